"""The sampling index: a view of the log in memory, rebuilt from Redis after a restart."""
