"""Find the answer in a response to a maths question, and compare it with the gold answer (docs/rewards.md)."""
