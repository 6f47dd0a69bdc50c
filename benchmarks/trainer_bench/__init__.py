"""Parts of benchmarks/trainer.py."""
