"""`tba setup`: everything that a run needs before it begins, once, by whoever deploys the services."""

from tba.setup.run import PARTS, Part, run_setup
from tba.setup.upgrade import check_against_run

__all__ = ["PARTS", "Part", "check_against_run", "run_setup"]
