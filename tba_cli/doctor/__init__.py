"""`tba doctor`: check everything that a run depends on, and say how to fix what is wrong.

It only writes a few objects under `check/` in the store, and removes them again.
"""

from tba_cli.doctor.run_checks import run_checks
from tba_cli.doctor.target import CheckResult, Target

__all__ = ["CheckResult", "Target", "run_checks"]
