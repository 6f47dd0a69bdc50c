"""Runs from Python: `import tba`, then `tba.run(recipe, ...)` and `tba.Run("name")` (docs/python.md)."""

from tba_cli.scripting.launch import run
from tba_cli.scripting.run_handle import Run
from tba_cli.scripting.tables import Listing, Rollouts, Table

__all__ = ["Listing", "Rollouts", "Run", "Table", "run"]
