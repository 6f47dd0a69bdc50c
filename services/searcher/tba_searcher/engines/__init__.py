"""Generation engines behind one protocol (`base.Engine`)."""
