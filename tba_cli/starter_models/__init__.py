"""Makers of starting models: small models and data sets for the tiny recipes, and the warm starts (lessons.py).

Random weights, real architectures and file formats, made-up rows: nothing is downloaded. Each program here runs in a
process of its own, since it imports torch.
"""
