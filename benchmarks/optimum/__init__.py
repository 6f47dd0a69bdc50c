"""The enumerable task: it shows which policy an objective converges to."""
