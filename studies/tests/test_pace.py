"""A paced engine: the pace of a GPU, late steps counted, aborts and weights while it waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tba_searcher.engines.engine import Completion, Engine, EngineError, Request

from studies.pace import MAX_SLEEP_S, PacedEngine, StepPace, late_share
from tba.versions import START, PolicyVersion
from tba.wire import Manifest, Sampling, VersionSpan

NUM_SLOTS = 4
STEP_S = 0.4
"""4 slots at 10 tokens/s."""


class Clock:
    """Time that passes only where somebody sleeps or works."""

    def __init__(self) -> None:
        self.now_s, self.sleeps = 100.0, list[float]()

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds


class FakeEngine:
    """Decodes one token for every active request in `work_s`; a request has as many tokens as its limit says."""

    version, default_eos_ids, num_slots, num_prefilled_tokens = START, (), NUM_SLOTS, 0

    def __init__(self, clock: Clock, work_s: float = 0.01) -> None:
        self._clock, self.work_s = clock, work_s
        self.left: dict[str, int] = {}
        self.load_s = 0.0
        self.num_steps = 0

    @property
    def num_active(self) -> int:
        return min(len(self.left), NUM_SLOTS)

    @property
    def num_waiting(self) -> int:
        return len(self.left) - self.num_active

    def submit(self, request: Request) -> None:
        self.left[request.request_id] = request.max_response_tokens

    def abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def step(self) -> list[Completion]:
        self._clock.now_s += self.work_s
        self.num_steps += 1
        for name in list(self.left)[:NUM_SLOTS]:
            self.left[name] -= 1
        done = [name for name, left in self.left.items() if left == 0]
        for name in done:
            del self.left[name]
        return [completion(name) for name in done]

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        self._clock.now_s += self.load_s
        self.version = version

    def verify(self, manifest: Manifest) -> None: ...

    def close(self) -> None:
        self.left.clear()


def completion(name: str) -> Completion:
    return Completion(
        request_id=name,
        response_tokens=np.array([5], np.int32),
        sampler_logprobs=np.zeros(1, np.float32),
        sampling=Sampling.of(1.0),
        finish_reason="length",
        version_spans=(VersionSpan.of(START, 0, 1),),
        started_at_s=0.0,
        finished_at_s=0.0,
    )


def request(name: str, num_tokens: int = 1) -> Request:
    return Request(
        request_id=name,
        prompt_tokens=(5,),
        sampling=Sampling.of(1.0),
        max_response_tokens=num_tokens,
        eos_ids=(),
    )


def make(work_s: float = 0.01) -> tuple[PacedEngine, FakeEngine, Clock]:
    clock = Clock()
    real = FakeEngine(clock, work_s)
    return PacedEngine(real, tokens_per_s=NUM_SLOTS / STEP_S, clock=clock, sleep=clock.sleep), real, clock


def run(engine: PacedEngine, clock: Clock) -> dict[str, float]:
    """Step until nothing is left; return when each request was completed, in seconds from now."""
    began_s, done = clock.now_s, dict[str, float]()
    while engine.num_active + engine.num_waiting:
        done |= {each.request_id: round(clock.now_s - began_s, 6) for each in engine.step()}
    return done


def test_it_is_an_engine() -> None:
    assert isinstance(make()[0], Engine)


def test_all_slots_together_get_the_pace_and_a_lone_straggler_no_more_than_its_share() -> None:
    engine, _, clock = make()
    for number in range(12):
        engine.submit(request(f"r{number}", num_tokens=2))
    engine.submit(request("straggler", num_tokens=10))
    done = run(engine, clock)
    # 24 tokens with all slots busy: 10 tokens/s
    assert [done[f"r{number}"] for number in (0, 4, 8)] == pytest.approx([0.8, 1.6, 2.4])
    # alone it decodes as slowly as among others: 1 / 0.4 s = 2.5 tokens/s
    assert done["straggler"] == pytest.approx(2.4 + 10 * STEP_S)
    assert engine.pace.late_s == 0
    assert engine.pace.busy_s == pytest.approx(16 * STEP_S)


def test_it_sleeps_and_never_long() -> None:
    engine, real, clock = make()
    engine.submit(request("a", num_tokens=3))
    run(engine, clock)
    assert real.num_steps == 3
    assert max(clock.sleeps) <= MAX_SLEEP_S
    assert sum(clock.sleeps) == pytest.approx(3 * (STEP_S - real.work_s))


def test_a_completion_is_active_until_its_step_is_due() -> None:
    engine, real, _ = make()
    engine.submit(request("a"))
    assert engine.step() == []
    assert (real.num_active, engine.num_active, engine.num_waiting) == (0, 1, 0)
    with pytest.raises(EngineError, match="already being worked on"):
        engine.submit(request("a"))


def test_an_abort_forgets_a_completion_that_waits_and_begins_a_new_schedule() -> None:
    engine, _, clock = make()
    engine.submit(request("a"))
    assert engine.step() == []
    engine.abort("a")
    assert engine.num_active + engine.num_waiting == 0
    clock.now_s += 1000  # idle, not late
    engine.submit(request("b"))
    assert run(engine, clock) == {"b": pytest.approx(STEP_S)}
    assert engine.pace.late_s == 0


def test_weights_are_loaded_while_it_waits_and_hold_up_the_step() -> None:
    engine, real, clock = make()
    real.load_s = 0.7
    engine.submit(request("a", num_tokens=2))
    began_s = clock.now_s
    engine.step()
    engine.load_weights([], PolicyVersion(1, 4))
    assert engine.version == PolicyVersion(1, 4)
    run(engine, clock)
    assert clock.now_s - began_s == pytest.approx(2 * STEP_S + 0.7)
    assert engine.pace.late_s == 0


def test_small_delays_are_made_up_for() -> None:
    engine, _, clock = make()
    engine.submit(request("a", num_tokens=10))
    began_s = clock.now_s
    while engine.num_active:
        engine.step()
        clock.now_s += 0.01  # a hand-over between threads
    assert clock.now_s - began_s == pytest.approx(10 * STEP_S, abs=0.05)
    assert engine.pace.late_s == 0


def test_a_real_engine_that_is_too_slow_is_counted() -> None:
    engine, real, clock = make(work_s=3 * STEP_S)
    engine.submit(request("a", num_tokens=30))
    began_s = clock.now_s
    run(engine, clock)
    passed_s = clock.now_s - began_s
    # what the GPU would have needed is 30 steps; the rest of the time is late
    assert passed_s == pytest.approx(30 * real.work_s)
    assert engine.pace.late_s == pytest.approx(passed_s - 30 * STEP_S, abs=3 * STEP_S)
    assert engine.pace.late_share == pytest.approx(2 / 3, abs=0.05)


def test_the_logs_of_searchers_say_how_late_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert late_share(tmp_path) is None
    engine, _, clock = make(work_s=3 * STEP_S)
    engine.submit(request("a", num_tokens=30))
    run(engine, clock)
    (tmp_path / "searcher-0.log").write_text(capsys.readouterr().out)
    assert late_share(tmp_path) == pytest.approx(engine.pace.late_share, abs=0.01)
    line = "2026-11-23T21:52:43.712542Z [info     ] pace kept        [pace] busy_s={} late_s={}\n"
    (tmp_path / "searcher-0.log").write_text(line.format(10.0, 9.0) + line.format(30.0, 3.0))
    (tmp_path / "searcher-1.log").write_text(line.format(70.0, 0.0))
    assert late_share(tmp_path) == pytest.approx(0.03)


def test_a_step_of_the_trainer_ends_no_sooner_and_what_is_late_stays_late() -> None:
    clock = Clock()
    pace, late_s = StepPace(STEP_S, clock=clock, sleep=clock.sleep), []
    for work_s, waits in ((0.1, True), (0.1, False), (0.6, False), (0.1, False), (0.1, True)):
        pace.begin(has_waited=waits)
        clock.now_s += work_s
        late_s.append(pace.end())
        clock.now_s += 0.05  # the update, which is part of the next step unless that waits for data
    assert late_s == pytest.approx([0, 0, 0.25, 0, 0])
    # four steps, of which one is late, and one that begins when its data has come
    assert clock.now_s - 100.0 == pytest.approx(4 * STEP_S + 0.25 + 0.05 + STEP_S + 0.05)
