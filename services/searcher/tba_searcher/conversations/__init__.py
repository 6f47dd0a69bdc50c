"""Messages and tools as tokens, replies as messages, and the next turn as tokens after those that were sampled."""
