"""Time to a target accuracy, of tba and of TRL's GRPOTrainer: the parts of studies/time_to_target.py."""
