"""Checkpoints, files of weights on their way to the store, and the export of a run."""
