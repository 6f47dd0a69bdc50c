"""Make the prompts of a run from files, data sets and code."""
