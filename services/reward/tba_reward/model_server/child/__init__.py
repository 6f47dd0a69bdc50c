"""The program of a model process: `python -m tba_reward.model_server.child` starts it, and nothing imports it."""
