"""The sections of benchmarks/searcher.py, one file each."""
