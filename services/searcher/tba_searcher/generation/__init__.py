"""From a lease to a push: the work queue, the engine thread, delivery and heartbeats."""
