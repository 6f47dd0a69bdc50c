"""Trace the memory of a trainer's step without its model, its data or a GPU: its own code runs on fake tensors (torch).

__main__       `python -m tba_trainer.memory_trace`: trace a recipe, print the bytes as JSON
step           build model and batch, make one step, extrapolate over the layers
fake_device    large tensors without values beside small real ones, and the bytes of all that are alive
"""
