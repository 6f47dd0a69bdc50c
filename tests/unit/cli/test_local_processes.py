"""The supervisor of a local run: its children, signals, ports and the lines that it shows."""

from __future__ import annotations

import asyncio
import io
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tba.api import RunInfo, RunSummary
from tba.api.stats import FailedReason, Rates
from tba.errors import ChildError, ConfigError
from tba_cli.console import Console, Loudness
from tba_cli.local import progress as progress_module
from tba_cli.local import supervisor
from tba_cli.local.processes import ProcessManager, ProcessSpec
from tba_cli.local.progress import duration, progress_line, until_over
from tba_cli.ports import PortRequest, choose_ports
from tests.support.history_values import RUN_INFO, evaluation, stats


class FakeChild(SimpleNamespace):
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


async def not_over() -> bool:
    return False


def end_of_a_trainer(code: int, folder: Path) -> None:
    """A manager sees that its trainer has ended, without a word."""
    given: dict[str, Any] = {"console": None, "reaper": None}
    given["folder"] = SimpleNamespace(path=folder, log_path=lambda name: Path(f"{name}.log"))
    processes = ProcessManager(**given, is_over=not_over, stop_timeout_s=1.0)

    async def watch() -> None:
        exit_code = asyncio.get_running_loop().create_future()
        exit_code.set_result(code)
        spec = ProcessSpec(name="trainer", kind="trainer", command=[], environ={})
        child: Any = FakeChild(name="trainer", spec=spec, tail=[], exit_code=exit_code)
        processes._ended.put_nowait(child)
        await processes.watch()

    asyncio.run(watch())


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (143, r"^trainer was stopped \(SIGTERM\) before the run was over"),
        (-9, r"^trainer died \(killed by SIGKILL\)"),
        (1, r"^trainer died \(exit code 1\) and wrote nothing to trainer.log"),
    ],
)
def test_a_trainer_that_was_told_to_stop_did_not_die(code: int, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=sentence):
        end_of_a_trainer(code, tmp_path)


def test_a_child_that_dies_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=1_000_000, used=999_500, free=500)
    monkeypatch.setattr("tba.store.file.shutil.disk_usage", lambda path: usage)
    with pytest.raises(ChildError, match=r"trainer.log; the disk of /.* is full: 500 of 1,000,000 bytes are free"):
        end_of_a_trainer(1, tmp_path)


# ---- Ports ----------------------------------------------------------------------------------------------------------


def any_port(key: str) -> PortRequest:
    return PortRequest(key, "127.0.0.1", 0)


def test_port_0_becomes_different_free_ports():
    ports = choose_ports([any_port("a"), any_port("b"), any_port("c")])
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_one_sentence_with_what_to_do():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            choose_ports([any_port("a"), PortRequest("buffer.port", "127.0.0.1", port)])
        assert f"port {port} (buffer.port) is in use by another process (`ss -ltnp` names it)" in str(error.value)
        assert "--set buffer.port=0" in str(error.value)


def test_two_services_cannot_share_a_port():
    port = choose_ports([any_port("a")])[0]
    with pytest.raises(ConfigError, match=rf"port {port} \(reward.port\) is in use"):
        choose_ports([PortRequest("buffer.port", "127.0.0.1", port), PortRequest("reward.port", "127.0.0.1", port)])


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="cannot listen on"):
        choose_ports([PortRequest("buffer.port", "192.0.2.1", 0)])


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("first", "second", "after_s", "is_killed"),
    [
        (TERM, HUP, 0.5, False),  # the end of a login session
        (HUP, TERM, 0.5, False),
        (TERM, HUP, 2.0, True),
        (INT, TERM, 0.5, True),
        (INT, HUP, 0.5, True),
        (TERM, INT, 0.5, True),
        (TERM, TERM, 0.5, True),
        (INT, INT, 0.5, True),
    ],
)
def test_a_second_signal_stops_at_once_unless_both_are_one_request(monkeypatch, first, second, after_s, is_killed):
    clock = SimpleNamespace(monotonic=Mock(side_effect=[1000.0, 1000.0 + after_s]))
    monkeypatch.setattr(supervisor, "time", clock)
    asked = Mock(_stop_requested=supervisor.asyncio.Event(), _processes=Mock(), _console=Mock())
    supervisor.Supervisor._on_signal(asked, first)
    assert asked._stop_requested.is_set()
    assert not asked._processes.kill.called
    supervisor.Supervisor._on_signal(asked, second)
    assert asked._processes.kill.called == is_killed


WAIT = {"name": "rollouts", "for_s": 1.0, "deadline_in_s": 5.0}
ENDED = evaluation("1-30", 0.9).model_copy(update={"abandoned": True, "finished_at_s": 1e9})


def info(step: int, **fields: Any) -> RunInfo:
    evals = [evaluation("0-0", 0.3).model_dump(), ENDED.model_dump()]
    return RunInfo.model_validate({**RUN_INFO, "step": step, "evals": evals, **fields})


def test_a_line_says_what_is_known_and_leaves_out_the_rest() -> None:
    assert progress_line(info(3, evals=[]), stats(), "flat", {}, 10, None) == "step 3/10  flat"
    rates = {"window_s": 20.0, "generated_per_s": 9.0, "evicted_per_s": 0.0, "drawn_per_s": 0.0, "trained_per_s": 4.0}
    known = stats().model_copy(update={"rates": Rates(**rates)})
    recent = {"reward_mean": [None, 0.25, 0.5], "frac_reward_zero_std": [0.5, 1.0, 0.0]}
    line = (
        "step 3/10  flat  reward 0.500  mean of 2 steps 0.375  groups without a difference 0%  held-out accuracy 0.300"
    )
    line += "  rollouts/s 9 generated 4 trained  ETA 1:03"
    assert progress_line(info(3), known, "flat", recent, 10, 9.0) == line
    for step, state in ((0, "waiting"), (3, "waiting"), (0, "flat")):
        two = [{**WAIT, "owner": f"trainer-host-{number}", "kind": "trainer"} for number in range(2)]
        waits = progress_line(info(step, waits=two, evals=[]), stats(), state, {}, 10, None)
        assert waits == f"step {step}/10  {state}  waits: trainer: rollouts"


@pytest.mark.parametrize(
    ("step", "fields", "state", "said"),
    [
        (0, {}, "waiting", "evaluating the starting model, 12 of 40 held-out prompts"),
        (10, {}, "learning", "evaluating version 1-10, 12 of 40 held-out prompts"),
        (4, {"state": "stopping"}, "learning", "evaluating version 1-4, 12 of 40 held-out prompts"),
        (4, {}, "learning", "learning  evaluating version 1-4, 12 of 40 held-out prompts  ETA 0:54"),
    ],
)
def test_an_evaluation_is_said_with_how_far_it_is(step: int, fields: dict[str, Any], state: str, said: str) -> None:
    pending = {"state": "pending", "num_prompts": 40, "num_done": 12, "accuracy": None}
    evals = [{**evaluation(f"1-{step}" if step else "0-0", 0.3).model_dump(), **pending}]
    line = progress_line(info(step, evals=evals, **fields), stats(), state, {}, 10, 9.0)
    assert line == f"step {step}/10  {said}"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3665, "1:01:05")])
def test_durations_are_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


FAILED = [FailedReason(reason="exception", num=6, example="exception: ValueError: \x1bx")]


def test_a_run_says_how_far_it_is_which_scores_fail_and_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(progress_module, "LINE_INTERVAL_S", 0.0)
    # a second lineage went back to step 2: nothing is known of its pace yet
    polls = [{}, {"step": 5}, {"step": 2, "lineage": 2}, {"step": 4, "lineage": 2}]
    polls.append({"step": 5, "lineage": 2, "state": "done"})
    answers: Iterator[dict[str, Any]] = iter(polls)
    known = stats().model_copy(update={"failed_reasons": FAILED, "num_failed": 6})
    fields = {"state": "flat", "doing": "It runs.", "learning": None, "finding": "It is.", "remedy": "Try `x`."}
    said = RunSummary.model_validate(fields)
    client: Any = SimpleNamespace(
        run=lambda: info(**{"step": 1, **next(answers)}),
        stats=lambda: known,
        summary=lambda: said,
        curves=lambda **_: SimpleNamespace(values={}),
    )
    out = io.StringIO()
    console = Console("normal", stream=out)
    asyncio.run(until_over(client, console, num_steps=9, silence_s=1.0, on_run=lambda _: asyncio.sleep(0)))
    lines = out.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    found = [(line.split()[1], "ETA" in line) for line in steps]
    assert found == [("1/9", False), ("5/9", True), ("2/9", False), ("4/9", False), ("5/9", True)], "two tell no pace"
    others = [line for line in lines if line not in steps]
    assert others == [r"6 scores failed: ValueError: \x1bx", "flat: It is. Try x."], "a remedy is said once"


@pytest.mark.parametrize(("loudness", "shown"), [("quiet", ""), ("normal", "warning"), ("verbose", "info warning")])
def test_loudness_decides_which_lines_of_children_are_shown(loudness: Loudness, shown: str) -> None:
    out = io.StringIO()
    console = Console(loudness, stream=out)
    console.child_line("trainer", "2026 [info     ] step")
    console.child_line("trainer", "2026 [warning  ] careful\x1b[2J")
    console.result("always")
    lines = out.getvalue().splitlines()
    assert [line.split("[")[1].split()[0] for line in lines[:-1]] == shown.split()
    assert all(line.startswith("trainer     | ") and "\x1b" not in line for line in lines[:-1])
    assert lines[-1] == "always"
