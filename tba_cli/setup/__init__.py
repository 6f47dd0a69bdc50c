"""`tba setup`: set up everything that a run needs before it begins, once per deployment."""

from tba_cli.setup.run_setup import PARTS, Part, run_setup
from tba_cli.setup.upgrade import check_against_run

__all__ = ["PARTS", "Part", "check_against_run", "run_setup"]
