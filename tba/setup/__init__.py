"""`tba setup`: everything that a run needs before it begins, once, by whoever deploys the services."""

from tba.setup.run import PARTS, Part, run_setup

__all__ = ["PARTS", "Part", "run_setup"]
