"""The sentences about a run: what it does, how it learns, what waits, and the most urgent thing to try."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tba_buffer.monitoring.summary import CURVE_NAMES, REMEDY_OF_WAIT, summarise

from tba.api import ComponentInfo, Curves, EvalInfo, FailedReason, RunInfo, RunSummary, Stats, StoredStats, WaitInfo
from tests.support.history_values import run_info
from tests.support.history_values import stats as make_stats

OPERATIONS = Path(__file__).resolve().parents[3] / "docs" / "operations.md"


def component(name: str, kind: str = "searcher", **changes: Any) -> ComponentInfo:
    values = {"state": "generating", "version": "1-5", "alive": True, "heartbeat_age_s": 0.1, "gauges": {}}
    return ComponentInfo(component_id=name, kind=kind, **{**values, **changes})


def run(**changes: Any) -> RunInfo:
    working = [component("trainer-1", "trainer", state="training"), component("searcher-0")]
    return run_info(**{"step": 40, "num_steps": 500, "components": working, **changes})


def stats(**changes: Any) -> Stats:
    return make_stats().model_copy(update=changes)


def curves(**values: list[float | None]) -> Curves:
    num = max((len(one) for one in values.values()), default=0)
    steps = list(range(1, num + 1))
    return Curves(
        names=list(values),
        num_steps=num,
        num_steps_per_point=1,
        first_steps=steps,
        steps=steps,
        at_s=[0.0] * num,
        values={name: values.get(name, [None] * num) for name in CURVE_NAMES},
        num_abandoned=0,
    )


def about(
    info: RunInfo | None = None, counted: Stats | None = None, values: dict[str, list[float | None]] | None = None
) -> RunSummary:
    return summarise(info or run(), counted or stats(), curves(**values or {}))


def test_it_says_what_a_running_run_does() -> None:
    busy = run(
        components=[
            component("trainer-1", "trainer", state="training"),
            component("s", gauges={"tokens_per_s": 1234.4}),
        ]
    )
    said = about(busy, stats(num_rollouts=9000)).doing
    assert (
        said
        == "At step 40 of 500, the trainer is training; 1 searcher makes 1,234 tokens/s; 9,000 rollouts are stored."
    )
    alone = about(run(components=[]))
    assert alone.doing == "At step 40 of 500, no trainer is there; no searcher is alive; 0 rollouts are stored."
    assert alone.learning is None


def test_it_says_how_a_run_ended_and_gives_no_advice_then() -> None:
    over = run(
        state="failed",
        state_reason="out of memory",
        waits=[WaitInfo(owner="s", name="rollouts", for_s=99, deadline_in_s=1)],
    )
    said = about(over, values={"wait_s": [9.0], "step_s": [1.0]})
    assert said.doing.startswith("The run has failed (out of memory) at step 40 of 500")
    assert (said.waiting, said.advice) == (None, None)  # nothing that a running system could do
    assert about(over, stats(num_failed=7)).advice == (
        "100 % of the stored rollouts have no score (7 failed); nothing learns from these. Try: compare their data "
        "with what the scorer needs (Rollouts, Failed; `tba config check`)."
    )


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.1] * 10 + [0.5] * 10, "began at 0.1, is 0.5, and rises lately"),
        ([0.5] * 10 + [0.1] * 10, "began at 0.5, is 0.1, and falls lately"),
        ([0.0, 1.0] * 10, "is 0.5, and is flat lately"),
        ([0.3] * 20, "is 0.3, and is flat lately"),
        ([None, 0.25], "is 0.25"),
        ([None, None], "No step knows a reward"),
    ],
)
def test_it_says_where_the_reward_goes(rewards: list[float | None], said: str) -> None:
    assert said in (about(values={"reward_mean": rewards}).learning or "")


def test_it_says_what_evaluations_found() -> None:
    def evaluation(version: str, accuracy: float | None, state: str = "done", *, abandoned: bool = False) -> EvalInfo:
        fields: Any = {"state": state, "accuracy": accuracy, "abandoned": abandoned}
        return EvalInfo.model_construct(eval_id="e", version=version, **fields)

    evals = [evaluation("0-0", 0.3), evaluation("1-40", 0.9), evaluation("1-50", None, "pending")]
    evals.append(evaluation("1-45", 0.98, abandoned=True))  # the run went back to 1-40
    said = about(run(evals=evals), values={"reward_mean": [0.5]}).learning
    assert said is not None
    assert said.endswith("Held-out accuracy went from 0.300 (version 0-0) to 0.900 (version 1-40).")


def test_the_wait_of_the_trainer_comes_first_and_short_ones_are_none() -> None:
    searcher = WaitInfo(owner="searcher-0", name="reward-workers", for_s=500, deadline_in_s=9, kind="searcher")
    trainer = WaitInfo(owner="trainer-1", name="rollouts", for_s=12, deadline_in_s=50, kind="trainer")
    said = about(run(waits=[searcher, trainer]))
    assert said.waiting == "trainer-1 waits for 'rollouts' since 12 s (at most 50 s more)."
    assert said.advice == f"Try: {REMEDY_OF_WAIT['rollouts']}."
    assert about(run(waits=[trainer.model_copy(update={"for_s": 1.0})])).waiting is None


def test_advice_is_the_most_urgent_one() -> None:
    alarm = component("trainer-1", "trainer", gauges={"alarm_on_ess_collapse": 1.0})
    gone = component("searcher-3", alive=False)
    many_failed = stats(num_failed=5, num_scored=2)
    everything: dict[str, list[float | None]] = {
        "tied_group_share": [0.9],
        "wait_s": [9.0],
        "step_s": [1.0],
        "ess": [0.1],
    }
    said = [
        about(run(components=[alarm, gone]), many_failed, values=everything).advice,
        about(run(components=[alarm, gone]), values=everything).advice,
        about(run(components=[gone]), values=everything).advice,
        about(values=everything).advice,
        about(values={**everything, "tied_group_share": [0.1]}).advice,
        about(values={"wait_s": [9.0], "step_s": [1.0]}).advice,
        about(values={"ess": [0.9]}).advice,
    ]
    words = [
        "71 % of the stored rollouts have no score",
        "Alarm ess_collapse",
        "searcher-3",
        "all rewards are equal",
        "size is 0.10",
        "waits 90 %",
    ]
    assert [word in (text or "") for word, text in zip(words, said[:-1], strict=True)] == [True] * len(words)
    assert said[-1] is None


def test_failed_scores_are_named_with_their_share_and_commonest_reason() -> None:
    reasons = [FailedReason(reason="bad_data", num=4, example="bad_data: needs the column 'gold'")]
    searcher = run(components=[component("searcher-3", alive=False)])
    few = stats(num_failed=10, num_scored=90, failed_reasons=reasons)
    assert "searcher-3" in (about(searcher, few).advice or ""), "what stands still is more urgent"
    for info, counted, share in (
        (searcher, stats(num_failed=63, num_scored=37, failed_reasons=reasons), "63 %"),
        (run(), few, "10 %"),
    ):
        said = about(info, counted).advice or ""
        assert said.startswith(f"{share} of the stored rollouts have no score"), said
        assert """most often with the reason "bad_data: needs the column 'gold'"; nothing""" in said
    assert about(run(), stats(num_failed=4, num_scored=96)).advice is None


def test_a_scorer_that_always_says_the_same_is_named_also_when_the_run_is_over() -> None:
    stored = StoredStats.model_construct(reward_deciles=[0.0] * 11)
    counted = stats(num_scored=960).model_copy(update={"stored": stored})
    for state in ("running", "done", "failed"):
        said = about(run(state=state), counted, {"tied_group_share": [1.0]}).advice
        assert said is not None
        assert said.startswith("All 960 stored rewards are 0, so nothing can be learned. Is the scorer right?")
    few = stats(num_scored=3).model_copy(update={"stored": stored})
    assert about(run(), few).advice is None


def test_one_that_ended_is_not_silent() -> None:
    assert about(run(components=[component("searcher-3", alive=False, state="ended")])).advice is None


def test_of_the_files_of_a_killed_run_it_says_that_nothing_is_alive() -> None:
    waits = [WaitInfo(owner="buffer", name="rollouts", for_s=99, deadline_in_s=1)]
    killed = run(read_only=True, components=[component("searcher-3", alive=False)], waits=waits)
    said = about(killed)
    assert said.doing == (
        "Nothing of this run is alive; it was not brought to an end at step 40 of 500. 0 rollouts are stored."
    )
    assert (said.waiting, said.advice) == (None, None)
    assert "size is 0.10" in (about(killed, values={"ess": [0.1]}).advice or "")


def test_every_wait_with_a_remedy_is_one_of_the_product() -> None:
    table = OPERATIONS.read_text().partition("\n## Waits\n")[2].partition("\n**The audit")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(REMEDY_OF_WAIT) <= {name for cell in first_cells for name in re.findall("`([^`]+)`", cell)}
