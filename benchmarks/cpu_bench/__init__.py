"""Parts of `benchmarks/cpu_per_step.py`."""
