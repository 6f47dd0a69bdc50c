"""Makers of small models and data sets in the file formats of the real ones: what the tiny recipes run on.

Random weights, real architectures, made-up rows: nothing is downloaded. `python -m tba_trainer.tiny` makes one.
"""
