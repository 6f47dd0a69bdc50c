"""Prompts: the catalog, the leases that searchers hold, and evaluations of held-out prompts."""
