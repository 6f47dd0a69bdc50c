"""The reward service: completions in, rewards out, over HTTP. It keeps no state."""
