"""Trace the memory of a trainer's step without its model, its data or a GPU: its own code runs on fake tensors (torch).

__main__       `python -m tba_trainer.memory_trace`: trace a recipe, print the bytes as JSON
step           build model and batch, make one step, extrapolate over the layers
fake_device    fake tensors beside small real ones, and a count of the bytes of live tensors
"""
