"""Generation engines behind one protocol (`engine.Engine`)."""
