"""Background scoring: score pending rollouts, retry, and score stored rollouts again."""
