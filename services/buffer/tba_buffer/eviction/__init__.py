"""Eviction: the policies that choose rollouts to drop, the plan they make, and the task that carries it out."""
