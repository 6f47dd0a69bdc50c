"""Schedules of numbers that have bounds of their own, at every step."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from tba.config.schedules import Schedule


def _ends(schedule: Schedule) -> list[float]:
    return [schedule.value] if schedule.kind == "constant" else [schedule.value, schedule.final]


MAX_RATE, MAX_COEFFICIENT = 1e3, 1e6
"""Beyond what any run uses, and far below where AdamW or the loss overflow."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0


def _at_most(most: float, what: str, schedule: Schedule) -> Schedule:
    if schedule.highest > most:
        raise ValueError(f"{what} is at most {most:g}, and this one reaches {schedule.highest:g}; lower it")
    return schedule


def _rate(schedule: Schedule) -> Schedule:
    return _at_most(MAX_RATE, "a learning rate", schedule)


def _coefficient(schedule: Schedule) -> Schedule:
    return _at_most(MAX_COEFFICIENT, "a KL coefficient", schedule)


def _at_most_one(schedule: Schedule) -> Schedule:
    if max(_ends(schedule)) > 1:
        raise ValueError(f"a probability is at most 1 at every step, and this schedule reaches {max(_ends(schedule))}")
    return schedule


def _above_zero(schedule: Schedule) -> Schedule:
    if min(_ends(schedule)) <= 0:
        raise ValueError("a temperature is above 0 at every step, and this schedule reaches 0")
    lowest = min(*_ends(schedule), schedule.at(0))  # a warm-up begins below both ends
    for value in (lowest, schedule.highest):
        if not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
            raise ValueError(
                f"a temperature is from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g} at every step, and this one "
                f"reaches {value:g}"
            )
    return schedule


Probability = Annotated[Schedule, AfterValidator(_at_most_one)]
"""From 0 to 1."""
Temperature = Annotated[Schedule, AfterValidator(_above_zero)]
"""From MIN_TEMPERATURE to MAX_TEMPERATURE."""
LearningRate = Annotated[Schedule, AfterValidator(_rate)]
"""At most MAX_RATE."""
KlCoefficient = Annotated[Schedule, AfterValidator(_coefficient)]
"""At most MAX_COEFFICIENT."""
