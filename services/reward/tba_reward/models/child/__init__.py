"""Inside a model process. Nothing outside this package imports it: `python -m tba_reward.models.child` starts it."""
