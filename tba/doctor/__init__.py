"""`tba doctor`: look at everything a run stands on, and say how to mend what is wrong. It changes nothing but a few
objects under `check/` in the store, which it removes."""

from tba.doctor.finding import Finding
from tba.doctor.patient import Patient
from tba.doctor.run import examine

__all__ = ["Finding", "Patient", "examine"]
