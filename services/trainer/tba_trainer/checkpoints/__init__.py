"""Checkpoints, and snapshots of weights to publish, with their files and canaries."""
