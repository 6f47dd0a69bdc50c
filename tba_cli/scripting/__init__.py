"""Runs from Python: `import tba`, then `tba.run(recipe, ...)` and `tba.Run("name")` (docs/python.md)."""

from tba_cli.scripting.launch import run
from tba_cli.scripting.run_handle import Run

__all__ = ["Run", "run"]
