"""The reward of a task: its scorers, their cache, and the weighted sum with gates."""
