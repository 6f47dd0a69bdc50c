"""The parts of benchmarks/asynchrony.py."""
