"""The training loop: draw, filter, step, acknowledge, publish, checkpoint."""
