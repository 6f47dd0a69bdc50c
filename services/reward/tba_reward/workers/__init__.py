"""Worker processes that can be killed: a nursery that forks them, a pool that gives them items."""
