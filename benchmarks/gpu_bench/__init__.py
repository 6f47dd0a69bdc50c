"""Parts of benchmarks/gpu.py: one list of checks, each in a process of its own.

check          what a check is, and what it finds
checks         the list of all checks, the most valuable first
runner         run them with deadlines; one JSON line each, written at once; the report
machine        card, versions, measured ceilings
models         models with random weights, batches, recipes
kernels, training, families, teams, costs, weight_path, vllm_engine, runs    the checks
"""
