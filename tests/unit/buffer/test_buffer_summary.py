"""The state of a run by its numbers: its evidence, one sentence and one remedy, on recorded runs of each kind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tba_buffer import service
from tba_buffer.monitoring.summary import CURVE_NAMES, REMEDY_OF_WAIT, STATES, summarise
from tba_buffer.service import idle_cores

from tba.api import ComponentInfo, Curves, EvalInfo, FailedReason, RunInfo, RunSummary, Stats, StoredStats, WaitInfo
from tests.support.buffer import make_recipe
from tests.support.history_values import run_info
from tests.support.history_values import stats as make_stats

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "page.md"
OPERATIONS = ROOT / "docs" / "operations.md"
RECORDED = ROOT / "tests" / "data" / "run_states"


def component(name: str, kind: str = "searcher", **changes: Any) -> ComponentInfo:
    values = {"state": "generating", "version": "1-5", "alive": True, "heartbeat_age_s": 0.1, "gauges": {}}
    return ComponentInfo(component_id=name, kind=kind, **{**values, **changes})


WORKING = [component("trainer-1", "trainer", state="training"), component("searcher-0")]


def run(**changes: Any) -> RunInfo:
    return run_info(**{"step": 40, "num_steps": 500, "components": WORKING, **changes})


def stats(**changes: Any) -> Stats:
    return make_stats().model_copy(update=changes)


def curves(num: int = 30, **values: Any) -> Curves:
    """Return curves of `num` steps; a single value is that of every step, a list has one for each."""
    columns = {name: value if isinstance(value, list) else [value] * num for name, value in values.items()}
    steps = list(range(1, num + 1))
    return Curves(
        names=list(values),
        num_steps=num,
        num_steps_per_point=1,
        first_steps=steps,
        steps=steps,
        at_s=[0.0] * num,
        values={name: columns.get(name, [None] * num) for name in CURVE_NAMES},
        num_abandoned=0,
    )


def about(info: RunInfo | None = None, counted: Stats | None = None, shown: Curves | None = None) -> RunSummary:
    return summarise(info or run(), counted or stats(), shown or curves())


# ---- Recorded runs of each kind --------------------------------------------------------------------------------------
# The quickstart on two cores, with one thing wrong: a learning rate of 0.03 (collapsing; alarm is its first 13 steps),
# a gradient norm that fails it, a scorer that abstains, or gives 0, or half a point for "1", one token per answer, four
# slots, kill -9. SmolLM2: shuffled rewards (`flat-shuffled`), a rate of 0.001 (`collapsing-empty`). Numbers have three
# digits, long curves 30 points.


@pytest.mark.parametrize(
    ("name", "state", "finding", "remedy"),
    [
        ("failed", "failed", "It failed: step 1-9: grad_spike", "--resume"),
        ("failing-scores", "failing-scores", "18 % of the stored rollouts have no score (264 failed)", "config check"),
        ("waiting", "waiting", "The run is paused (lunch).", "tba resume"),
        ("collapsing", "collapsing", "the mean reward fell from 0.317 to 0.", "tba rollback"),
        (
            "collapsing-empty",
            "collapsing",
            "empty (from 28 tokens to 1). Alarms that are on: ess_collapse, log",
            "rate (now 0.001).",
        ),
        ("alarm", "alarm", "the effective sample size is 0.04.", "lower the learning rate"),
        ("cut-off", "cut-off", "100 % of the answers are cut", "max_response_tokens"),
        ("flat-zero", "flat", "All 2,300 stored rewards are 0", "tba score"),
        ("flat-same", "flat", "distinct answers in a batch of 128: 2", "tba rollback"),
        ("flat-shuffled", "flat", "has not risen in 60 steps", "higher learning rate"),
        ("interrupted", "interrupted", "not brought to an end", "--resume"),
        ("starved", "starved", "waits 93 % of its time", "No core of the machine is idle"),
        ("solved", "solved", "96 % of the answers in a batch succeed.", "harder prompts"),
        ("ended", "ended", "trained to version 1-25", None),
        ("learning", "learning", "The mean reward has risen.", None),
    ],
)
def test_a_recorded_run_is_in_its_state(name: str, state: str, finding: str, remedy: str | None) -> None:
    document = json.loads((RECORDED / f"{name}.json").read_text())
    said = summarise(
        RunInfo.model_validate(document["info"]),
        Stats.model_validate(document["stats"]),
        Curves.model_validate(document["curves"]),
    )
    assert (said.state, finding in said.finding) == (state, True), said.text
    assert (remedy or "") in (said.remedy or ""), said.text
    assert (remedy is None) == (said.remedy is None)


def test_the_states_are_those_of_the_docs() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [name for name, _ in STATES] == [name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])]


# ---- What a sentence says --------------------------------------------------------------------------------------------


def test_it_says_what_a_running_run_does() -> None:
    busy = run(components=[component("s", gauges={"tokens_per_s": 1234.4}), component("t", alive=False)])
    assert about(busy, stats(num_rollouts=9000)).doing == (
        "The run is at step 40 of 500; 9,000 rollouts are stored, and searchers (1 alive) make 1,234 tokens/s."
    )
    new = about(run(components=[]), shown=curves(0))
    assert (new.state, new.learning, new.remedy) == ("waiting", None, None)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.1] * 10 + [0.5] * 10, "was 0.1 in step 1, and is 0.5 lately, where it rises."),
        ([0.5] * 10 + [0.1] * 10, "was 0.5 in step 1, and is 0.1 lately, where it falls."),
        ([0.0, 1.0] * 10, "was 0 in step 1, and is 0.5 lately, where it is steady."),
        ([0.5, 0.6] * 5 + [0.5, 0.6, 0.6, 0.6, 0.6] * 2, "is 0.58 lately."),
        ([None, 0.25, 0.75], "was 0.25 in step 2, and is 0.5 lately."),
        ([None, None], "No step knows a reward"),
    ],
)
def test_it_says_where_the_reward_went_from_its_first_step_on(rewards: list[float | None], said: str) -> None:
    assert said in (about(shown=curves(len(rewards), reward_mean=rewards)).learning or "")
    thinned = curves(2, reward_mean=[0.25, 0.5]).model_copy(update={"first_steps": [1, 3], "steps": [2, 4]})
    assert "was 0.25 in steps 1 to 2, and" in (about(shown=thinned).learning or "")


def evaluation(version: str, accuracy: float | None, state: str = "done", *, abandoned: bool = False) -> EvalInfo:
    fields: Any = {"state": state, "accuracy": accuracy, "abandoned": abandoned}
    return EvalInfo.model_construct(eval_id="e", version=version, **fields)


def test_it_says_what_evaluations_found() -> None:
    evals = [evaluation("0-0", 0.3), evaluation("1-40", 0.9), evaluation("1-50", None, "pending")]
    evals.append(evaluation("1-45", 0.98, abandoned=True))  # the run went back to 1-40
    said = about(run(evals=evals)).learning
    assert said is not None
    assert said.endswith("Held-out accuracy went from 0.300 (version 0-0) to 0.900 (version 1-40).")


def test_text_for_a_terminal_has_no_backticks() -> None:
    said = about(run(state="paused", state_reason="lunch"))
    assert said.line == "waiting: The run is paused (lunch). Resume it (tba resume)."
    assert said.text.endswith(said.line)
    assert "`" not in said.text


# ---- Which state comes first, and where the numbers do not tell ------------------------------------------------------


def wait(name: str, for_s: float, kind: str = "trainer") -> WaitInfo:
    return WaitInfo(owner=f"{kind}-1", name=name, for_s=for_s, deadline_in_s=50, kind=kind)


def test_a_request_that_the_buffer_holds_is_no_fault_of_the_buffer() -> None:
    assert "'recent' since 7 s" in about(run(waits=[wait("batch", 8), wait("recent", 7)])).finding
    assert "'batch' since 8 s" in about(run(waits=[wait("batch", 8), wait("scorer-away", 9, "buffer")])).finding


def test_the_most_urgent_state_comes_first() -> None:
    evidence: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ("failed", {"state": "failed", "state_reason": "out of memory"}, {}, {}),
        ("failing-scores", {}, {"num_failed": 10, "num_scored": 90}, {}),
        ("waiting", {"waits": [wait("batch", 99)]}, {}, {}),
        ("collapsing", {}, {}, {"entropy": [0.9] + [3.1] * 29}),
        ("alarm", {"components": [component("t", "trainer", gauges={"alarm_on_grad_spike": 1.0})]}, {}, {}),
        ("cut-off", {}, {}, {"completions/clipped_ratio": 0.75}),
        ("flat", {}, {}, {"frac_reward_zero_std": 0.9}),
        ("starved", {}, {}, {"wait_s": 2.0, "step_s": 1.0}),
    ]
    for at, (state, *_) in enumerate(evidence):
        info: dict[str, Any] = {}
        counted: dict[str, Any] = {}
        shown: dict[str, Any] = {}
        for _, of_run, of_stats, of_curves in evidence[at:]:
            info, counted, shown = {**of_run, **info}, {**of_stats, **counted}, {**of_curves, **shown}
        assert about(run(**info), stats(**counted), curves(**shown)).state == state
    assert about().state == "learning"


def test_truncated_episodes_are_told_apart_by_their_stop_conditions() -> None:
    recipe = make_recipe(environments={"addition": {"environment": "tests.support.environments:Scripted"}})
    said = summarise(run(), stats(), curves(30, **{"completions/clipped_ratio": 0.75}), recipe)
    assert (said.state, "stop conditions" in str(said.remedy)) == ("cut-off", True)


def test_failed_scores_are_named_with_their_share_and_commonest_reason() -> None:
    reasons = [FailedReason(reason="bad_data", num=4, example="bad_data: needs the column 'gold'")]
    said = about(counted=stats(num_failed=63, num_scored=37, failed_reasons=reasons)).finding
    assert said == (
        "63 % of the stored rollouts have no score (63 failed), most often with the reason "
        "\"bad_data: needs the column 'gold'\"."
    )
    assert about(counted=stats(num_failed=9, num_scored=91)).state == "learning"


def test_a_scorer_that_always_says_the_same_is_named_also_when_the_run_is_over() -> None:
    stored = StoredStats.model_construct(reward_deciles=[0.0] * 11)
    counted = stats(num_scored=960).model_copy(update={"stored": stored})
    for state in ("running", "done"):
        said = about(run(state=state), counted, curves(frac_reward_zero_std=1.0))
        assert (said.state, said.finding) == ("flat", "All 960 stored rewards are 0, so nothing can be learned.")
    few = stats(num_scored=3).model_copy(update={"stored": stored})
    assert about(counted=few).state == "learning"


def test_right_answers_alone_are_solved_and_not_flat() -> None:
    tied: dict[str, Any] = {
        "frac_reward_zero_std": 0.97,
        "accuracy": 0.95,
        "num_rollouts": 128.0,
        "num_unique_rollouts": 2.0,
    }
    assert about(shown=curves(**tied)).state == "solved"
    # a replay of the best rollouts alone
    assert about(run(evals=[evaluation("1-20", 0.4)]), shown=curves(**tied)).state == "flat"
    assert about(run(evals=[evaluation("0-0", 0.4)]), shown=curves(**tied)).state == "solved"
    rising: dict[str, Any] = {"reward_mean": [0.1, 0.3] * 5 + [0.5, 0.7] * 10, "frac_reward_zero_std": 0.97}
    assert about(shown=curves(**rising)).state == "learning", "what was learned is not flat"
    said = about(shown=curves(**{**rising, "num_rollouts": 128.0, "num_unique_rollouts": 1.0}))
    assert (said.state, "distinct answers in a batch of 128: 1" in said.finding) == ("flat", True)


def test_a_fall_of_the_reward_is_a_collapse_and_noise_is_none() -> None:
    falls = [0.3] * 10 + [0.7, 0.8] * 5 + [0.3, 0.4] * 5
    assert "fell from 0.75 to 0.35" in about(shown=curves(reward_mean=falls)).finding
    breaks = [0.475, 0.546, 0.363, 0.363] + [0.0] * 11  # the quickstart with a learning rate of 0.5
    assert about(shown=curves(**{"reward_mean": breaks, "completions/clipped_ratio": 1.0})).state == "collapsing"
    rare = [value for best in (0.6, 0.2, 0.1) for value in [0.0] * 9 + [best]]
    for fine in ([0.3] * 10 + [0.7, 0.8] * 5 + [0.5, 0.7] * 5, rare, [0.9, 0.92] * 10 + [0.86, 0.88] * 5):
        assert about(shown=curves(reward_mean=fine)).state == "learning"


def test_entropy_that_rises_with_the_reward_is_no_collapse() -> None:
    entropy = [0.05] * 10 + [1.2] * 20
    assert about(shown=curves(entropy=entropy, reward_mean=[0.1, 0.2] * 15)).state == "collapsing"
    assert about(shown=curves(entropy=entropy, reward_mean=[n / 30 for n in range(30)])).state == "learning"


def test_a_reward_of_old_weights_is_not_flat() -> None:
    assert about(shown=curves(60, reward_mean=[0.2, 0.3] * 30, policy_age_mean=20.0)).state == "flat"
    assert about(shown=curves(60, reward_mean=[0.2, 0.3] * 30, policy_age_mean=40.0)).state == "learning"
    assert about(shown=curves(40, reward_mean=[0.2, 0.3] * 20, policy_age_mean=2.0)).state == "learning"


def test_what_is_learned_in_a_few_steps_is_a_rise() -> None:
    assert about(shown=curves(60, reward_mean=[0.3] + [0.8, 0.9] * 29 + [0.8])).finding == "The mean reward has risen."


def test_short_right_answers_are_no_collapse_and_one_batch_of_empty_ones_is_none() -> None:
    empty: dict[str, Any] = {"completions/mean_length": [30.0] * 5 + [1.0] * 5}
    assert about(shown=curves(10, **empty)).state == "learning", "no reward is known"
    assert about(shown=curves(10, reward_mean=0.0, **empty)).state == "collapsing"
    assert about(shown=curves(10, reward_mean=[0.1] * 5 + [0.4] * 5, **empty)).state == "learning"
    assert (
        about(shown=curves(10, reward_mean=0.0, **{"completions/mean_length": [30.0] * 9 + [1.0]})).state == "learning"
    )


def test_an_alarm_outlives_the_run_and_its_remedy_names_only_what_can_move() -> None:
    drift = component("t", "trainer", gauges={"alarm_on_log_ratio_drift": 1.0})
    shown, done = curves(learning_rate=1e-3), run(components=[drift], state="done", state_reason="trained")
    said = summarise(run(components=[drift]), stats(), shown, make_recipe())
    assert "rate (now 0.001), raise beta or most_on_policy_prob" in (said.remedy or "")
    ends = make_recipe(trainer={"sync_interval": 1}, sampling={"most_on_policy_prob": 1.0})
    said = summarise(run(components=[drift]), stats(), shown, ends)
    assert (said.remedy or "").endswith("lower the learning rate (now 0.001), raise beta (`tba set`).")
    tied = curves(frac_reward_zero_std=[0.5] * 27 + [1.0] * 3)
    assert "alarm log_ratio_drift was on, and now in every group" in about(done, shown=tied).finding
    assert "begin anew" in (about(done, shown=tied).remedy or "")
    assert about(done, shown=curves(accuracy=1.0)).state == "solved"


def test_a_first_batch_without_a_difference_is_no_learning_and_a_stop_is_said_as_one() -> None:
    assert about(shown=curves(1, frac_reward_zero_std=1.0)).state == "flat"
    assert about(shown=curves(2, frac_reward_zero_std=[1.0, 0.9])).state == "learning"
    why = "trained to version 1-40, step 40 of 500: the run was stopped: no new batches"
    assert about(run(state="done", state_reason=why)).finding == "It was stopped at step 40 of 500."


def test_cut_answers_that_teach_are_none_of_a_problem() -> None:
    rising: dict[str, Any] = {"reward_mean": [0.1, 0.3] * 5 + [0.5, 0.7] * 10}
    cut: dict[str, Any] = {"completions/clipped_ratio": 1.0}
    assert about(shown=curves(**rising, **cut)).state == "learning"
    assert about(shown=curves(2, **cut)).state == "learning", "two batches are few"


# ---- Waits and starvation --------------------------------------------------------------------------------------------


def test_a_wait_is_named_if_it_is_the_trainers_or_a_fault_and_longer_than_usual() -> None:
    said = about(run(waits=[wait("reward-unreachable", 500, "searcher"), wait("unpublished-versions", 12)]))
    assert said.finding == "trainer-1 waits for 'unpublished-versions' since 12 s (at most 50 s more)."
    assert said.remedy == REMEDY_OF_WAIT["unpublished-versions"]
    for quiet in (wait("rollouts", 4.0), wait("trainer-ahead", 99, "searcher"), wait("reward-workers", 9, "searcher")):
        assert about(run(waits=[quiet])).state == "learning"
    last = about(run(waits=[wait("final-evaluation", 9)]))
    assert (last.state, last.remedy) == ("waiting", None)
    slow = curves(wait_s=5.0, step_s=9.0)
    assert about(run(waits=[wait("rollouts", 14)]), shown=slow).state == "learning"
    assert about(run(waits=[wait("rollouts", 16)]), shown=slow).state == "waiting"


def test_a_run_that_cannot_go_on_waits() -> None:
    assert about(run(note="no trainer: none has come")).finding == "No trainer is there."
    assert "accept-loss" in (about(run(loss="7 changes are missing")).remedy or "")


@pytest.mark.parametrize(
    ("idle_cores", "backend", "waits", "remedy"),
    [
        (3.2, "local", [], "Add searchers (`tba scale`): 3 cores"),
        (0.4, "local", [], "No core of the machine is idle"),
        (None, "none", [], "Use rollouts more often"),
        (None, "kubernetes", [], "Add searchers (`tba scale`), or use"),
        (3.2, "local", [wait("reward-workers", 9, "searcher")], "Give the reward service more workers"),
    ],
)
def test_more_searchers_are_advised_only_where_there_is_room(
    idle_cores: float | None, backend: str, waits: list[WaitInfo], remedy: str
) -> None:
    gauges = {} if idle_cores is None else {"idle_cores": idle_cores}
    searchers = {"revision": 0, "desired": 1, "source": "recipe", "alive": 1, "backend": backend}
    info = run(components=[*WORKING, component("buffer", "buffer", gauges=gauges)], searchers=searchers, waits=waits)
    said = about(info, shown=curves(wait_s=9.0, step_s=1.0))
    assert (said.state, said.finding) == ("starved", "The trainer waits 90 % of its time for rollouts.")
    assert (said.remedy or "").startswith(remedy)
    assert about(info, shown=curves(10, wait_s=9.0, step_s=1.0)).state == "learning", "the start is slow"


def test_of_the_files_of_a_killed_run_it_says_that_it_was_interrupted() -> None:
    waits = [wait("rollouts", 99)]
    dead = component("trainer-1", "trainer", alive=False, gauges={"alarm_on_grad_spike": 1.0})
    killed = run(read_only=True, components=[dead], waits=waits)
    said = about(killed, shown=curves(wait_s=9.0, step_s=1.0, accuracy=1.0))
    assert said.doing == "The run stands at step 40 of 500; 0 rollouts are stored."
    assert (said.state, said.remedy) == ("interrupted", "Continue it (`tba run --resume`).")
    assert about(run(read_only=True, state="done", state_reason="trained")).state == "ended"


def test_every_wait_with_a_remedy_is_one_of_the_product() -> None:
    table = OPERATIONS.read_text().partition("\n## Waits\n")[2].partition("\n**The audit")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(REMEDY_OF_WAIT) <= {name for cell in first_cells for name in re.findall("`([^`]+)`", cell)}


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [
        ({}, True),
        ({"scaling": {}}, False),  # they run elsewhere
        ({"searcher": {"device": "cuda"}}, False),
        ({"searcher": {"engine": "simulated"}}, False),
    ],
)
def test_idle_cores_are_counted_where_more_searchers_would_run_on_them(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_known: bool
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.25, 9.0, 9.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5, 7, 8})
    monkeypatch.setattr(service, "core_limits", lambda: [4.0])
    assert idle_cores(make_recipe(**{"scaling": {"backend": "local"}, **changes})) == (
        {"idle_cores": 2.75} if is_known else {}
    )
