"""Redis: connections, keys, Lua scripts, durability checks, and which process owns the run."""
