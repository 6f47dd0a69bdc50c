"""Local mode: `tba run` starts Redis and every service as child processes of one supervisor (Linux and macOS)."""
