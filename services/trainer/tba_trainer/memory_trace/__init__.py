"""Trace the memory of a trainer's step without model, data or GPU: the trainer's code runs on torch's fake tensors.

__main__       `python -m tba_trainer.memory_trace`: trace a recipe, print the bytes as JSON
step           build model and batch, make one step, extrapolate over the layers
fake_device    fake tensors beside small real ones, and a count of the bytes of live tensors
"""
