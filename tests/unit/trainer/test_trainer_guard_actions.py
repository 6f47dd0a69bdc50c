"""The guards as a pure function: conditions, patience, actions, limits, what is remembered."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_trainer.learner.guards import (
    NAMES,
    GuardState,
    StepAction,
    check_step,
    holds_checkpoints,
    suspects_weights,
    usual_grad_norm,
)

from tba.config.trainer import REMEDIES, GuardsSection
from tests.support.guards import make_guards

FINE: dict[str, float | None] = {"loss": 0.1, "grad_norm": 1.0, "ess": 0.9, "log_ratio_token_mean": -0.01}
BAD: dict[str, dict[str, float | None]] = {
    "non_finite": {"loss": math.nan},
    "grad_spike": {"grad_norm": 100.0},
    "ess_collapse": {"ess": 0.01},
    "log_ratio_drift": {"log_ratio_token_mean": -3.0},
    "on_policy_gap": {"logprob_gap_on_policy": 4.9, "logprob_gap_limit": 0.06},
}


def after(guards: GuardsSection, *steps: dict[str, float | None] | None, state: GuardState | None = None) -> StepAction:
    *first, last = steps
    for metrics in first:
        state = check_step(guards, state or GuardState(), metrics).state
    return check_step(guards, state or GuardState(), last)


def names(result: StepAction) -> list[str]:
    return [alarm.name for alarm in result.alarms]


def test_a_step_that_is_fine_is_applied_and_says_nothing() -> None:
    result = after(make_guards(), *[FINE] * 20)
    assert (result.skip, result.alarms, result.actions, result.reason) == (None, (), frozenset(), "")
    expected = [*(f"{kind}_{name}" for kind in ("alarms", "alarm_on") for name in NAMES), "rollbacks"]
    assert result.state.gauges() == dict.fromkeys(expected, 0.0)


@pytest.mark.parametrize("bad", [{name: value} for name in ("loss", "grad_norm") for value in (math.nan, math.inf)])
@pytest.mark.parametrize("action", ["none", "skip", "fail"])
def test_what_is_not_finite_is_never_applied_whatever_the_action(bad: dict[str, float], action: str) -> None:
    for patience in (1, 3):
        guards = make_guards(non_finite={"action": action, "patience_steps": patience})
        result = after(guards, FINE, FINE | bad)
        assert (result.skip, names(result)) == ("non_finite", ["non_finite"] if patience == 1 else [])


def test_a_norm_is_a_spike_beside_the_median_of_the_applied_ones() -> None:
    guards = make_guards(grad_spike={"factor": 10, "window_steps": 8, "action": "skip"})
    usual = [FINE | {"grad_norm": norm} for norm in (1.0, 2.0, 3.0)]
    assert names(after(guards, FINE, FINE | {"grad_norm": 1e6})) == []  # one norm says nothing about the usual
    assert names(after(guards, *usual, FINE | {"grad_norm": 19.9})) == []
    result = after(guards, *usual, FINE | {"grad_norm": 20.1})
    assert (names(result), result.skip) == (["grad_spike"], "grad_spike")
    assert result.reason == "grad_spike: the gradient norm is 20.1, more than 10 times the usual 2"
    assert result.state.grad_norms == (1.0, 2.0, 3.0, 20.0)  # no higher than what was still usual
    assert after(guards, *[FINE] * 50).state.grad_norms == (1.0,) * 8


@pytest.mark.parametrize("action", ["none", "skip"])
def test_spikes_are_capped_in_the_median_which_follows_where_the_norms_have_risen_for_good(action: str) -> None:
    guards = make_guards(grad_spike={"factor": 10, "window_steps": 8, "action": action})
    state, fired = after(guards, *[FINE] * 8).state, []
    for step in range(20):
        result = check_step(guards, state, FINE | {"grad_norm": 1e9 if step == 0 else 50.0})
        state = result.state
        assert (result.skip is not None) is (bool(result.alarms) and action == "skip")
        if result.alarms:
            fired.append(step)
    assert fired == [0, 1, 2, 3]  # then half of the window is 10, and the median 5.5
    assert state.grad_norms == (50.0,) * 8


TIED = {"frac_reward_zero_std": 1.0}
SPARSE = [FINE | ({"grad_norm": 0.4} if step % 8 == 0 else {"grad_norm": 1e-3, **TIED}) for step in range(80)]
"""One batch in 8 has a reward signal; the others have the KL alone."""


def test_a_batch_with_a_rare_success_is_no_spike_and_ten_times_its_norm_is_one() -> None:
    guards = make_guards(grad_spike={"action": "skip"})
    state = GuardState()
    for metrics in SPARSE:
        result = check_step(guards, state, metrics)
        assert result.alarms == ()
        state = result.state
    assert usual_grad_norm(guards, state) == 1e-3  # what relative clipping goes by is the median of all
    for spike in (FINE | {"grad_norm": 4.1}, FINE | {"grad_norm": 4.1, **TIED}):
        assert check_step(guards, state, spike).skip == "grad_spike"
    assert check_step(guards, state, FINE | {"grad_norm": 3.9}).alarms == ()


def test_what_clipping_goes_by_does_not_depend_on_which_batches_have_a_signal() -> None:
    guards, dense = make_guards(), [{**metrics, "frac_reward_zero_std": 0.5} for metrics in SPARSE]
    assert after(guards, *SPARSE).state.grad_norms == after(guards, *dense).state.grad_norms
    assert len(names(after(guards, *dense[:65]))) == 1  # the same norms, all with a signal


def test_an_objective_whose_groups_are_all_tied_is_watched_by_all_its_norms() -> None:
    tied = FINE | TIED
    assert names(after(make_guards(), *[tied] * 10, tied | {"grad_norm": 10.1})) == ["grad_spike"]
    assert names(after(make_guards(), *[tied] * 10, FINE | {"grad_norm": 10.1})) == []  # the first with a signal


def test_a_norm_that_is_skipped_for_another_reason_is_no_part_of_what_is_usual() -> None:
    guards = make_guards(ess_collapse={"patience_steps": 1, "action": "skip"}, grad_spike={"window_steps": 4})
    assert after(guards, FINE, FINE | BAD["ess_collapse"] | {"grad_norm": 3.0}).state.grad_norms == (1.0,)


def test_batches_without_a_gradient_say_nothing_about_the_usual_norm() -> None:
    guards, tied = make_guards(), FINE | {"grad_norm": 0.0, "frac_reward_zero_std": 1.0}
    state = after(guards, *[tied, FINE, tied] * 12).state
    assert state.grad_norms == state.signal_grad_norms == (1.0,) * 12
    assert usual_grad_norm(guards, state) == 1.0  # the clip stays on


def test_an_alarm_alone_changes_nothing_about_the_step() -> None:
    for name in ("grad_spike", "ess_collapse", "log_ratio_drift"):
        result = after(make_guards(**{name: {"patience_steps": 1}}), *[FINE] * 10, FINE | BAD[name])
        assert (names(result), result.skip, result.actions, result.reason) == ([name], None, frozenset(), "")
        assert result.state.num_alarms == {name: 1}


def test_the_defaults_skip_what_is_not_finite_fail_on_another_model_and_only_tell_the_rest() -> None:
    guards = GuardsSection()
    others = dict.fromkeys(("grad_spike", "ess_collapse", "log_ratio_drift"), "none")
    expected = {"non_finite": "skip", **others, "on_policy_gap": "fail"}
    assert {name: getattr(guards, name).action for name in NAMES} == expected


def test_log_probs_of_another_model_at_age_0_fail_the_run_before_the_batch_is_applied() -> None:
    result = after(make_guards(), FINE | BAD["on_policy_gap"])
    assert (result.skip, result.actions) == ("on_policy_gap", {"fail"})
    right = FINE | {"logprob_gap_on_policy": 0.05, "logprob_gap_limit": 0.06}
    for fine in (right, right | {"logprob_gap_on_policy": None}, FINE | {"logprob_gap_on_policy": 4.9}):
        assert after(make_guards(), fine).alarms == ()
    assert "too old" not in REMEDIES["on_policy_gap"]
    assert REMEDIES.keys() == set(NAMES)


@pytest.mark.parametrize("name", ["ess_collapse", "log_ratio_drift"])
def test_patience_counts_steps_in_a_row_and_begins_again_after_the_alarm(name: str) -> None:
    guards, bad = make_guards(**{name: {"patience_steps": 3, "action": "pause"}}), FINE | BAD[name]
    state, fired = GuardState(), []
    for step, metrics in enumerate([bad, bad, FINE, bad, bad, bad, bad, bad, bad, FINE], start=1):
        result = check_step(guards, state, metrics)
        state = result.state
        if result.alarms:
            fired.append(step)
            assert (result.actions, result.skip) == ({"pause"}, name)
    assert (fired, state.num_alarms) == ([6, 9], {name: 2})


def test_what_is_unknown_in_a_step_neither_counts_nor_ends_a_row() -> None:
    guards, bad = make_guards(ess_collapse={"patience_steps": 2}), FINE | BAD["ess_collapse"]
    assert names(after(guards, bad, FINE | {"ess": None}, bad)) == ["ess_collapse"]
    assert names(after(guards, bad, None, bad)) == ["ess_collapse"]
    assert names(after(guards, bad, FINE | {"ess": math.nan}, bad)) == ["ess_collapse"]


@pytest.mark.parametrize("action", ["skip", "pause", "rollback", "fail"])
def test_every_action_skips_the_batch(action: str) -> None:
    result = after(make_guards(ess_collapse={"patience_steps": 1, "action": action}), FINE | BAD["ess_collapse"])
    assert (result.skip, result.actions) == ("ess_collapse", {action})
    assert result.reason.startswith("ess_collapse: the effective sample size is 0.010 of the batch, below 0.1")


def test_the_actions_of_several_alarms_add_up() -> None:
    alarms = {"ess_collapse": {"patience_steps": 1, "action": "pause"}, "non_finite": {"action": "rollback"}}
    result = after(make_guards(**alarms), FINE | BAD["ess_collapse"] | BAD["non_finite"])
    assert (result.actions, result.skip) == ({"pause", "rollback"}, "non_finite")


def test_too_many_skipped_batches_in_a_row_fail_the_run() -> None:
    guards, bad = make_guards(max_skipped_in_row=3), FINE | BAD["non_finite"]
    assert "fail" not in after(guards, *[bad] * 3, FINE, *[bad] * 3).actions
    result = after(guards, bad, None, bad, bad)
    assert result.actions == {"skip", "fail"}
    assert "4 batches in a row were skipped" in result.reason
    assert "at most 3 may be" in result.reason


def test_nothing_to_train_on_is_a_skipped_step_without_an_alarm() -> None:
    result = after(make_guards(), FINE, None)
    assert (result.skip, result.alarms, result.actions) == ("refused", (), frozenset())
    assert result.state.num_skipped_in_row == 1
    assert after(make_guards(), None, None, FINE).state.num_skipped_in_row == 0


def test_rollbacks_are_bounded_and_counted_across_the_rollback() -> None:
    guards, bad = make_guards(non_finite={"action": "rollback"}, max_rollbacks=2), FINE | BAD["non_finite"]
    saved = after(guards, FINE).state
    for num_rollbacks, expected in enumerate([{"rollback"}, {"rollback"}, {"fail"}], start=1):
        result = check_step(guards, saved, bad)
        assert result.actions == expected
        # the checkpoint's windows, the counts of now
        saved = saved.after_resume(num_rollbacks=num_rollbacks, rolled_back=result.state)
    assert "rollbacks so far: 2, and a run may have no more" in result.reason
    resumed = GuardState().after_resume(num_rollbacks=2, rolled_back=None)
    assert (check_step(guards, resumed, bad).actions, saved.num_alarms) == ({"fail"}, {"non_finite": 3})
    assert saved.grad_norms == (1.0,)


def test_no_checkpoint_is_written_while_a_rollback_may_be_near_or_nothing_finite_comes_of_the_weights() -> None:
    bad = FINE | BAD["ess_collapse"]
    for action in ("rollback", "skip"):
        guards = make_guards(ess_collapse={"patience_steps": 3, "action": action})
        assert holds_checkpoints(guards, after(guards, bad).state) is (action == "rollback")
        assert not holds_checkpoints(guards, after(guards, bad, FINE).state)
        assert holds_checkpoints(guards, after(guards, FINE | BAD["non_finite"]).state)


def test_a_good_step_is_applied_with_nothing_on_that_rolls_back_or_fails() -> None:
    bad, unknown = FINE | BAD["ess_collapse"], FINE | {"ess": None}
    for action in ("rollback", "fail"):
        guards = make_guards(ess_collapse={"patience_steps": 3, "action": action})
        assert after(guards, FINE).state.num_since_good == 0
        assert after(guards, FINE, bad, bad, bad).state.num_since_good == 3
        assert after(guards, bad, bad, FINE).state.num_since_good == 0
        assert after(guards, FINE, bad, None, bad, unknown).state.num_since_good == 4
        assert after(guards, FINE, None, bad).state.num_since_good == 2  # no step without data says anything good
    guards = make_guards(ess_collapse={"patience_steps": 2, "action": "skip"})
    assert after(guards, FINE, bad).state.num_since_good == 0  # applied: training continues from it
    assert after(guards, FINE, bad, bad).state.num_since_good == 1
    assert after(make_guards(), FINE, FINE | BAD["non_finite"]).state.num_since_good == 1


def test_weights_are_suspected_while_a_condition_skips_batches_and_not_for_want_of_data() -> None:
    bad = FINE | BAD["ess_collapse"]
    for action, suspected in (("none", False), ("skip", True), ("fail", True)):
        guards = make_guards(ess_collapse={"patience_steps": 1, "action": action})
        assert suspects_weights(guards, after(guards, bad, None).state) is suspected
        assert not suspects_weights(guards, after(guards, FINE, None).state)
    assert suspects_weights(make_guards(), after(make_guards(), FINE | BAD["non_finite"]).state)
    # the engine of the searchers is to blame
    assert not suspects_weights(make_guards(), after(make_guards(), FINE | BAD["on_policy_gap"]).state)


METRICS = st.none() | st.fixed_dictionaries(
    {
        "loss": st.floats(),
        "grad_norm": st.floats(min_value=0) | st.just(math.nan),
        "ess": st.none() | st.floats(0, 1),
        "log_ratio_token_mean": st.none() | st.floats(-5, 5),
        "frac_reward_zero_std": st.sampled_from([None, 0.5, 1.0]),
    }
)


@given(st.lists(METRICS, min_size=1, max_size=40), st.integers(0, 39))
def test_a_state_from_a_checkpoint_decides_the_same(steps: list[dict[str, float | None] | None], cut: int) -> None:
    guards = make_guards(**{name: {"patience_steps": 2, "action": "rollback"} for name in NAMES})
    state, resumed = GuardState(), GuardState()
    for step, metrics in enumerate(steps):
        if step == cut:
            resumed = GuardState.model_validate_json(state.model_dump_json())
        result = check_step(guards, state, metrics)
        if step >= cut:
            assert check_step(guards, resumed, metrics) == result
            resumed = result.state
        if metrics is None or not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):  # pyright: ignore[reportArgumentType]
            assert result.skip is not None
        state = result.state
