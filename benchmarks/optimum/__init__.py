"""Where objectives converge: the enumerable task."""
