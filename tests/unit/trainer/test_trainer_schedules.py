"""The values of each step: the recipe's schedules, live changes, and the changes that guards make."""

from __future__ import annotations

import pytest
from tba_trainer.learner.schedules import MAX_ATTEMPTS, Schedules, scheduled

from tba.api import SettingsRequest
from tba.config import Recipe, parse_live
from tba.errors import ConfigError, ConflictError, FencedError
from tests.support.trainer_values import RecordedBuffer, make_recipe

FALLING = {"kind": "linear", "value": 0.4, "final": 0.2, "steps": 4}


@pytest.fixture
def recipe() -> Recipe:
    return make_recipe("model", objective={"beta": FALLING}, trainer={"learning_rate": 0.01, "num_steps": 9})


@pytest.fixture
def buffer() -> RecordedBuffer:
    buffer = RecordedBuffer()
    buffer.lineage = 1
    return buffer


def operator(buffer: RecordedBuffer, **settings: object) -> None:
    buffer.change_settings(SettingsRequest(settings=parse_live(settings)))


def test_a_step_is_made_with_the_recipes_schedules_at_its_step(recipe: Recipe) -> None:
    assert [scheduled(recipe, step=step).beta for step in (1, 3, 5, 9)] == pytest.approx([0.4, 0.3, 0.2, 0.2])


def test_the_settings_are_read_once_and_again_when_another_revision_is_told(
    recipe: Recipe, buffer: RecordedBuffer
) -> None:
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
    assert values.at(5).beta == pytest.approx(0.2)
    assert values.revision == 2


def test_a_trainer_that_starts_continues_with_the_live_values(recipe: Recipe, buffer: RecordedBuffer) -> None:
    operator(buffer, learning_rate=0.5)
    buffer.settings_revision = 0  # no reply has brought it yet
    values = Schedules(recipe, buffer)
    assert values.at(1).learning_rate == 0.5


def test_a_schedule_that_is_set_live_counts_the_steps_of_the_run(recipe: Recipe, buffer: RecordedBuffer) -> None:
    values = Schedules(recipe, buffer)
    operator(buffer, learning_rate=FALLING)
    assert [values.at(step).learning_rate for step in (1, 3, 5)] == pytest.approx([0.4, 0.3, 0.2])


def test_lowering_the_rate_scales_its_schedule_from_the_next_step_on(recipe: Recipe, buffer: RecordedBuffer) -> None:
    values = Schedules(recipe, buffer)
    operator(buffer, learning_rate=FALLING)
    values.at(2)
    assert values.lower_learning_rate(0.5, token="token-1", reason="grad_spike") == pytest.approx(0.15)
    assert values.at(3).learning_rate == pytest.approx(0.15)
    assert values.lower_learning_rate(0.5, token="token-1", reason="again") == pytest.approx(0.0625)
    assert values.at(5).learning_rate == pytest.approx(0.05)
    request = buffer.changes[1]
    assert (request.token, request.reason, request.settings.model_fields_set) == (
        "token-1",
        "grad_spike",
        {"learning_rate"},
    )


def test_a_step_that_a_resume_or_a_rollback_repeats_changes_nothing_more(
    recipe: Recipe, buffer: RecordedBuffer
) -> None:
    for lineage in (1, 2, 3):
        buffer.lineage = lineage
        values, token = Schedules(recipe, buffer), f"token-{lineage}"
        values.at(6)
        assert values.lower_learning_rate(0.5, token=token, reason="grad_spike") == pytest.approx(0.005)
        assert values.raise_most_on_policy_prob(0.2, token=token, reason="ess_collapse") == pytest.approx(0.7)
    assert [request.request_id for request in buffer.changes] == ["guard-lower_rate-6", "guard-raise_m-6"]
    assert values.at(7).learning_rate == pytest.approx(0.005)


def test_a_change_that_comes_between_is_not_overwritten(recipe: Recipe, buffer: RecordedBuffer) -> None:
    values, num_left = Schedules(recipe, buffer), [3]
    values.at(2)

    def before(method: str) -> None:
        if method == "change_settings" and num_left[0]:
            num_left[0] -= 1
            buffer.before, entered = lambda method: None, buffer.before
            operator(buffer, learning_rate=0.1 * (num_left[0] + 1))
            buffer.before = entered

    buffer.before = before
    assert values.lower_learning_rate(0.5, token="token-1", reason="grad_spike") == pytest.approx(0.05)
    assert len(buffer.changes) == 4


@pytest.mark.parametrize("moves", [True, False])
def test_a_change_that_is_refused_again_and_again_is_given_up(
    recipe: Recipe, buffer: RecordedBuffer, moves: bool
) -> None:
    values, asked = Schedules(recipe, buffer), list[str]()

    def before(method: str) -> None:
        if method == "change_settings":
            asked.append(method)
            buffer.settings_revision += moves
            raise ConflictError("not now")

    buffer.before = before
    with pytest.raises(ConflictError, match="not now"):
        values.lower_learning_rate(0.5, token="token-1", reason="grad_spike")
    assert len(asked) == (MAX_ATTEMPTS if moves else 1)


def test_raising_m_starts_from_what_others_have_set_and_ends_at_1(recipe: Recipe, buffer: RecordedBuffer) -> None:
    values = Schedules(recipe, buffer)
    values.at(1)
    operator(buffer, most_on_policy_prob=0.8)
    for step, expected in enumerate([0.95, 1.0, 1.0], start=1):
        values.at(step)
        assert values.raise_most_on_policy_prob(0.15, token="token-1", reason="ess_collapse") == pytest.approx(expected)
    assert len(buffer.changes) == 3  # the operator's, and two that changed something
    assert buffer.changes[-1].settings.most_on_policy_prob == 1.0


def test_a_trainer_of_a_dead_lineage_changes_nothing(recipe: Recipe, buffer: RecordedBuffer) -> None:
    values = Schedules(recipe, buffer)
    with pytest.raises(FencedError):
        values.lower_learning_rate(0.5, token="token-0", reason="late")
    assert values.at(1).learning_rate == 0.01


def test_live_settings_that_this_trainers_recipe_forbids_are_an_error(recipe: Recipe, buffer: RecordedBuffer) -> None:
    operator(buffer, beta=0)
    with pytest.raises(ConfigError, match=r"live settings: beta cannot be 0 .*, because tb needs it above 0"):
        Schedules(recipe, buffer).at(1)
