"""`tba doctor`: check everything that a run stands on, and say how to fix what is wrong.

It changes nothing but a few objects under `check/` in the store, which it removes again.
"""

from tba_cli.doctor.run_checks import run_checks
from tba_cli.doctor.target import CheckResult, Target

__all__ = ["CheckResult", "Target", "run_checks"]
