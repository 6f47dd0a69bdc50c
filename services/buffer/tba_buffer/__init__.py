"""The buffer service of tba: Redis holds the truth, this process holds a view of its log and answers HTTP."""
