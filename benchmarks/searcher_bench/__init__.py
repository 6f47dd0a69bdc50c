"""What benchmarks/searcher.py measures, one file per section."""
