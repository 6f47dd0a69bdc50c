"""Maths answers: where the answer of a response stands, and whether it is the gold answer (docs/rewards.md)."""
