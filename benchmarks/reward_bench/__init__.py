"""Parts of benchmarks/reward.py."""
