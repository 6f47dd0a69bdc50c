"""Built-in prompt generators: one file per task, found by name."""

from tba.tasks.base import load_generator

__all__ = ["load_generator"]
