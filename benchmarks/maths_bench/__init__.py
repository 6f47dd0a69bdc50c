"""The lists of maths answers that the scorer is compared with (`benchmarks/maths.py`, tests)."""
