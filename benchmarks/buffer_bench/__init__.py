"""The parts of benchmarks/buffer.py."""
