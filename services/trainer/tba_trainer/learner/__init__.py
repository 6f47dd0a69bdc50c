"""One optimizer step: forward and backward passes, reference, schedules, guards, metrics."""
