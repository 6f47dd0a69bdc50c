"""The buffer service of tba: Redis stores everything; this process keeps an index of its log and serves HTTP."""
