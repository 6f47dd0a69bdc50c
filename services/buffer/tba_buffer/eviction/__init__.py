"""Eviction: which rollouts go and why, and the task that deletes them."""
