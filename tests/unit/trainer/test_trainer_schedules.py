"""The values of each step: the recipe's schedules, and live changes."""

from __future__ import annotations

from typing import Any

import pytest
from tba_trainer.learner.schedules import Schedules

from tba.api import SettingsRequest
from tba.config import Recipe, parse_live
from tba.errors import ConfigError
from tests.support.trainer_values import RecordedBuffer, make_recipe

FALLING = {"kind": "linear", "value": 0.4, "final": 0.2, "steps": 4}


@pytest.fixture
def recipe() -> Recipe:
    return make_recipe("model", objective={"beta": FALLING}, trainer={"learning_rate": 0.01, "num_steps": 9})


@pytest.fixture
def buffer() -> Any:
    buffer = RecordedBuffer()
    buffer.lineage = 1
    return buffer


def operator(buffer: Any, **settings: object) -> None:
    buffer.change_settings(SettingsRequest(settings=parse_live(settings)))


def test_the_settings_are_read_once_and_again_when_another_revision_is_told(recipe: Recipe, buffer: Any) -> None:
    read: list[str] = []
    buffer.before = lambda method: read.append(method) if method == "settings" else None
    values = Schedules(recipe, buffer)
    assert [values.at(step).beta for step in (1, 2, 3)] == pytest.approx([0.4, 0.35, 0.3])
    assert (len(read), values.revision, values.eval_every_steps) == (1, 0, 2)
    operator(buffer, beta=0.7, eval_every_steps=5)
    assert (values.revision, values.eval_every_steps) == (0, 2)  # the step in progress continues as it began
    assert values.at(4).beta == 0.7
    assert (values.at(5).learning_rate, values.revision, values.eval_every_steps) == (0.01, 1, 5)
    operator(buffer, beta=None)
    assert (values.at(5).beta, values.revision) == (pytest.approx(0.2), 2)


def test_a_trainer_that_starts_continues_with_the_live_values(recipe: Recipe, buffer: Any) -> None:
    operator(buffer, learning_rate=0.5)
    buffer.settings_revision = 0  # no reply has brought it yet
    values = Schedules(recipe, buffer)
    assert values.at(1).learning_rate == 0.5


def test_a_schedule_that_is_set_live_counts_the_steps_of_the_run(recipe: Recipe, buffer: Any) -> None:
    values = Schedules(recipe, buffer)
    operator(buffer, learning_rate=FALLING)
    assert [values.at(step).learning_rate for step in (1, 3, 5)] == pytest.approx([0.4, 0.3, 0.2])


def test_live_settings_that_this_trainers_recipe_forbids_are_an_error(recipe: Recipe, buffer: Any) -> None:
    operator(buffer, beta=0)
    with pytest.raises(ConfigError, match=r"live settings: beta cannot be 0 .*, because tb needs it above 0"):
        Schedules(recipe, buffer).at(1)
