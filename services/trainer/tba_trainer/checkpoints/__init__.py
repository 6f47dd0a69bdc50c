"""Checkpoints and published weights: save, recover, export and delete."""
