"""Snapshots: the buffer saved to the object store, and runs that begin with one."""

from tba_buffer.snapshots.jobs import Snapshots

__all__ = ["Snapshots"]
