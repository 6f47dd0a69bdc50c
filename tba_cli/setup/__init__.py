"""`tba setup`: set up everything that a run needs before it begins, once per deployment."""

from tba_cli.setup.run_setup import PARTS, Part, run_setup

__all__ = ["PARTS", "Part", "run_setup"]
