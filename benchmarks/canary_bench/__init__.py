"""Parts of benchmarks/canary.py."""
