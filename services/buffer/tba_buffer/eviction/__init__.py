"""Eviction: the rules that choose rollouts to drop, and the task that deletes them."""
