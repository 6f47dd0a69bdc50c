"""Time to a target accuracy, of tba and of TRL's GRPOTrainer: the parts of benchmarks/time_to_target.py."""
