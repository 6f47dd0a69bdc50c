"""The output of `tba status`, once and while it follows, and of `tba set`."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest
from tba_trainer.learner.guards import NAMES

from tba.api import RunInfo, RunSummary, SettingsInfo, Stats, WaitInfo
from tba.clients import BufferClient
from tba.config.trainer import REMEDIES
from tba_cli.commands import status
from tba_cli.commands.control import settings_lines
from tba_cli.commands.status import follow, status_command, status_lines
from tba_cli.main import main
from tests.support.history_values import RUN_INFO, evaluation, stats

INFO = RUN_INFO | {"waits": [WaitInfo(owner="trainer-1", name="rollouts", for_s=4.0, deadline_in_s=26.0)]}
SUMMARY = RunSummary(state="flat", doing="It runs.", learning=None, finding="It is.", remedy="Try `\x1b[2J x`.")
LIVE: dict[str, Any] = {"learning_rate": 1e-4, "beta": 0.05, "most_on_policy_prob": 0.5, "sampling_temperature": 1}
LIVE |= {"eval_every_steps": 50}
"""What the recipe says of the settings that can change."""


def make_settings(**live: object) -> SettingsInfo:
    document = {"revision": len(live), "settings": live, "recipe": LIVE, "now": {}, "changes": [], "next": None}
    return SettingsInfo.model_validate(document)


def test_changed_settings_are_shown_beside_the_recipes_values() -> None:
    linear = {"kind": "linear", "value": 0.1, "final": 0.01, "steps": 400, "warmup_steps": 10}
    settings = make_settings(learning_rate=0.0002, beta=linear)
    lines = status_lines(RunInfo.model_validate(INFO), stats(), settings, SUMMARY)
    assert (
        "  changed settings (revision 2): learning_rate 0.0002 (recipe: 0.0001), "
        "beta linear 0.1 to 0.01 over 400 steps after 10 of warm-up (recipe: 0.05)"
    ) in lines


REWARD = {"component_id": "reward", "kind": "reward", "state": "not-ready", "version": None, "alive": True}
REWARD |= {"heartbeat_age_s": 1.0, "gauges": {}, "note": "the model is loading"}
GONE = {**REWARD, "state": "unreachable", "alive": False, "heartbeat_age_s": 60.0, "note": None}
EVALUATED = evaluation("1-2", 0.5, num_prompts=64).model_copy(update={"pass_at": {4: 0.75}})
MEASURED = "accuracy 0.500 sampled, 0.550 greedy, pass@4 0.750 on 64 held-out prompts"
ABANDONED = EVALUATED.model_copy(update={"abandoned": True})
BEST = {"version": "1-2", "metric": "accuracy", "value": 0.5, "num_prompts": 64, "num_samples": 4}
BEST_LINE = "best version 1-2: accuracy 0.500 on the 64 held-out prompts that all evaluations have in common"


@pytest.mark.parametrize(
    ("run", "counts", "line"),
    [
        ({}, {}, "trainer-1 waits for 'rollouts': 4 s so far, at most 26 s more"),
        ({}, {"evicted": {"policy_age": 2, "max_rollouts": 7}}, "evicted: max_rollouts 7, policy_age 2"),
        ({}, {"tokens": {"generated": 21800, "trained": 12000}}, "tokens: 21,800 generated, 12,000 trained"),
        ({"sampling_version": "1-1"}, {}, "latest version 1-4 (searchers sample with 1-1), checkpoint none"),
        ({"sampling_version": "1-4"}, {}, "latest version 1-4, checkpoint none"),
        ({"sampling_version": None}, {}, "latest version 1-4, checkpoint none"),
        ({"components": [REWARD]}, {}, "reward: not-ready (the model is loading)"),
        ({"components": [GONE]}, {}, "reward: unreachable  SILENT for 60 s"),
        ({"evals": [EVALUATED]}, {}, f"evaluation of 1-2: {MEASURED}"),
        ({"evals": [ABANDONED]}, {}, f"evaluation of 1-2 (abandoned: the run went back): {MEASURED}"),
        ({"best": BEST}, {}, BEST_LINE),
        ({"lineage": 2, "parents": {1: "0-0", 2: "1-40"}}, {}, "lineage 2 began at 1-40"),
    ],
)
def test_each_fact_is_a_line(run: dict[str, Any], counts: dict[str, Any], line: str) -> None:
    info = RunInfo.model_validate({**INFO, "latest_version": "1-4", **run})
    counted = Stats.model_validate({**stats().model_dump(), **counts})
    assert f"  {line}" in status_lines(info, counted, make_settings(), SUMMARY)


def test_what_there_is_not_has_no_line() -> None:
    lines = status_lines(RunInfo.model_validate({**INFO, "parents": {1: "0-0"}}), stats(), make_settings(), SUMMARY)
    for word in ("changed", "evicted", "tokens:", "trainer:", "went off", "  lineage"):
        assert not any(word in line for line in lines[1:]), lines


def test_who_paused_the_run_and_when_is_shown() -> None:
    paused = {"number": 1, "at_s": 1_800_000_000.0, "command": "pause", "role": "operator", "reason": "lunch"}
    paused |= {"old": "running", "new": "paused", "lineage": 1, "step": 3}
    info = RunInfo.model_validate({**INFO, "state": "paused", "state_reason": "lunch", "last_change": paused})
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_800_000_000))
    lines = status_lines(info, stats(), make_settings(), SUMMARY)
    assert [lines[0], lines[2]] == [
        "run 'demo': paused (lunch), step 3, lineage 1",
        f"  running -> paused by the operator ('pause') at {at}, after step 3",
    ]


def test_components_that_have_ended_are_counted_and_those_with_something_to_say_are_shown() -> None:
    def component(name: str, **fields: Any) -> dict[str, Any]:
        base = {"component_id": name, "kind": "searcher", "state": "ended", "version": "1-4", "alive": False}
        return {**base, "heartbeat_age_s": 90.0, "gauges": {}, **fields}

    components = [component(f"s{number}") for number in range(5)]
    components += [component("s7", state="running"), component("s8", alive=True, heartbeat_age_s=1.0)]
    components += [component("t1", kind="trainer", gauges={"alarms_entropy": 2.0})]
    lines = status_lines(RunInfo.model_validate({**INFO, "components": components}), stats(), make_settings(), SUMMARY)
    assert "  5 components have ended: s0, s1, s2 and 2 more" in lines
    assert [line for line in lines if line.startswith(("  s", "  t1"))] == [
        "  s7: running, version 1-4  SILENT for 90 s",
        "  s8: ended, version 1-4",
        "  t1: ended  SILENT for 90 s",
    ]


def test_what_the_trainer_skipped_and_refused_and_its_alarms_are_shown() -> None:
    gauges = {"alarms_grad_spike": 3.0, "alarm_on_grad_spike": 1.0, "alarms_ess_collapse": 0.0, "step": 3.0}
    trainer = {"component_id": "trainer-1", "kind": "trainer", "state": "training", "version": "1-3", "alive": True}
    info = RunInfo.model_validate({**INFO, "components": [{**trainer, "heartbeat_age_s": 0.1, "gauges": gauges}]})
    counts = {"batches_skipped": {"non_finite": 2}, "rollouts_refused_by_trainer": {"vocabulary": 5, "malformed": 1}}
    lines = status_lines(info, stats().model_copy(update=counts), make_settings(), SUMMARY)
    first = lines.index("  trainer-1: training") + 1
    assert lines[first].startswith("    grad_spike went off 3 times and is on: lower the learning rate")
    assert "  batches skipped by the trainer: non_finite 2" in lines
    assert "  rollouts refused by the trainer: malformed 1, vocabulary 5" in lines


def test_a_missing_trainer_is_said_and_control_characters_reach_no_terminal(monkeypatch, capsys) -> None:
    note = "no trainer: trainer-1 was last heard from 312 s ago, step 3; look at the trainer's log"
    info = RunInfo.model_validate({**INFO, "note": note, "state_reason": "a\x1b]0;owned\x07b\nc\x9b2J\u202ed"})
    client = Mock(spec=BufferClient, run=lambda: info, stats=stats, settings=make_settings, summary=lambda: SUMMARY)
    monkeypatch.setattr("tba_cli.commands.status.open_client", lambda _: client)
    status_command(Namespace(follow=False, json=False, url="http://buffer"))
    first, found, second, *_ = capsys.readouterr().out.splitlines()
    assert found == r"  flat: It is. Try \x1b[2J x."
    assert first == r"run 'demo': running (a\x1b]0;owned\x07b\nc\x9b2J\u202ed), step 3, lineage 1"
    assert second == f"  {note}"


def test_every_alarm_says_what_to_do() -> None:
    assert REMEDIES.keys() == set(NAMES)


# ---- The lines of `tba status --follow` ------------------------------------------------------------------------------


TRAINER = {"component_id": "t", "kind": "trainer", "state": "training", "version": "1-2", "alive": True}
TRAINER |= {"heartbeat_age_s": 0.1, "gauges": {}}
SEARCHER = {**TRAINER, "component_id": "s-1", "kind": "searcher"}
WAIT = {"owner": "s-1", "kind": "searcher", "name": "no-version", "for_s": 2.0, "deadline_in_s": 8.0}
DONE = {"state": "done"}


class Service:
    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = [RunInfo.model_validate({**RUN_INFO, **answer}) for answer in answers]

    def run(self) -> RunInfo:
        return self.answers.pop(0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return the lines of a follower between the first answer and the end."""
    monkeypatch.setattr(status, "FOLLOW_S", 0.0)

    def follow_both(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        assert follow(cast(BufferClient, Service(before, before, after, {**after, **DONE})), as_json=False) == 0
        lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
        return lines[lines.index("run 'demo': running, step 3, lineage 1") + 1 : -1]

    return follow_both


def test_ages_gauges_and_lengths_of_waits_make_no_line(told: Callable[..., list[str]]) -> None:
    silent = {**TRAINER, "alive": False}
    before = {"components": [SEARCHER, silent], "waits": [WAIT], "note": "no trainer for 60 s"}
    later = {**SEARCHER, "heartbeat_age_s": 0.9, "gauges": {"tokens_per_s": 2.0}}
    after = {"components": [later, {**silent, "heartbeat_age_s": 9.0}], "waits": [{**WAIT, "for_s": 2.5}]}
    first = told(before, before)
    assert told(before, {**after, "note": "no trainer for 61 s"}) == first


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ({"step": 4}, "run 'demo': running, step 4, lineage 1"),
        ({"note": "no trainer: none has come"}, "no trainer: none has come"),
        ({"waits": [WAIT]}, "s-1 waits for 'no-version': 2 s so far, at most 8 s more"),
        ({"components": [{**SEARCHER, "version": None}]}, "s-1: training, version none"),
        ({"waits": [{**WAIT, "for_s": 0.4}]}, None),
    ],
)
def test_changes_are_told_in_a_line_each(told, after, line):
    assert told({}, after) == ([] if line is None else [line])


def test_json_has_the_run_at_every_change_and_a_run_that_failed_is_one(monkeypatch, capsys) -> None:
    monkeypatch.setattr(status, "FOLLOW_S", 0.0)
    service = Service({}, {}, {"step": 4}, {"step": 4, "state": "failed"})
    assert follow(cast(BufferClient, service), as_json=True) == 1
    runs = [RunInfo.model_validate_json(line) for line in capsys.readouterr().out.splitlines()]
    assert [(run.step, run.state) for run in runs] == [(3, "running"), (4, "running"), (4, "failed")]


def audit(revision: int, changes: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = {name: {"old": old, "new": new} for name, (old, new) in changes.items()}
    document = {"revision": revision, "at_s": 1.0, "role": "operator", "reason": None, "lineage": 1, "step": 4}
    return {**document, "changes": found, **more}


def info(*changes: dict[str, Any], next: int | None = None) -> SettingsInfo:
    document = {"revision": 2, "settings": {"beta": 0.2}, "recipe": LIVE, "now": {**LIVE, "beta": 0.2}, "next": next}
    return SettingsInfo.model_validate({**document, "changes": list(changes)})


FIRST = audit(1, {"beta": (None, 0.2)}, reason="<diverges>")
SECOND = audit(2, {"learning_rate": (2e-5, None), "eval_every_steps": (None, 7)}, role="trainer")


def test_a_change_names_who_when_and_what() -> None:
    assert [change.line() for change in info(FIRST, SECOND).changes] == [
        "revision 1, by the operator after step 4: beta recipe -> 0.2 (<diverges>)",
        "revision 2, by the trainer after step 4: learning_rate 2e-05 -> recipe, eval_every_steps recipe -> 7",
    ]


def test_what_holds_is_shown_beside_what_the_recipe_says() -> None:
    lines = settings_lines(info(FIRST))
    assert lines[:2] == ["learning_rate: recipe, now 0.0001", "beta: 0.2 (recipe: 0.05), now 0.2"]
    assert lines[5].startswith("revision 1")


def test_all_pages_of_the_changes_are_read() -> None:
    class Client:
        def settings(self, *, after: int = 0) -> SettingsInfo:
            return info(FIRST, next=1) if after == 0 else info(SECOND)

    whole = BufferClient.all_settings(Client())  # pyright: ignore[reportArgumentType]
    assert [change.revision for change in whole.changes] == [1, 2]


@pytest.mark.parametrize("words", [["a", "b", "beta=1"], ["a", "beta=1", "--url", "http://127.0.0.1:1"]])
def test_a_word_that_is_no_setting_is_the_one_name_of_the_run(words: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["set", *words]) == 2
    assert "is neither KEY=VALUE nor the only name of a run" in capsys.readouterr().err


def test_a_setting_that_is_given_twice_is_refused_before_anybody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["set", "beta=0.1", "beta = 0.2", "--url", "http://127.0.0.1:1"]) == 2
    assert "'beta' is given twice, the second time as 'beta = 0.2'" in capsys.readouterr().err
