"""Parts of benchmarks/weights.py."""
