"""The parts of studies/asynchrony.py."""
