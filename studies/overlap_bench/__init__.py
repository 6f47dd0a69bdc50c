"""The parts of studies/overlap.py: what asynchrony is for, with real learning under the pace of GPUs."""
