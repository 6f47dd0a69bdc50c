"""One reward per file; see `tba_reward.registry`."""
