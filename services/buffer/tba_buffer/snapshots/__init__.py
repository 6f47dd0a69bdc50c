"""Snapshots: save the buffer to the object store, and load one into a new run."""
