"""One optimizer step: forward and backward passes with their metrics, AdamW, the reference, schedules, guards."""
