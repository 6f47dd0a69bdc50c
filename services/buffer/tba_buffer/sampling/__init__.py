"""Sampling: draw a batch by MOP, acknowledge it, and record it in the ledger."""
