"""Snapshots: the buffer saved to the object store, and runs that begin with one."""
