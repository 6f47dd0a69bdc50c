"""The engine's thread: steps that never come back, engines that die while weights are loaded."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tba_searcher.engines.engine import Completion, EngineDiedError, EngineError
from tba_searcher.engines.weights import LoadedWeights
from tba_searcher.generation import engine_thread
from tba_searcher.generation.engine_thread import EngineStep, EngineThread, run_step
from tba_searcher.generation.status import WaitRegistry

from tba.errors import DigestError
from tba.versions import START, PolicyVersion

V1 = PolicyVersion(1, 4)


def loaded(version: PolicyVersion) -> LoadedWeights:
    manifest: Any = SimpleNamespace(version=str(version))
    return LoadedWeights(version, (), manifest)


OLD, NEW = loaded(START), loaded(V1)


class ScriptedEngine:
    """One active request; each test decides what its calls do."""

    num_active, num_waiting = 1, 0

    def __init__(
        self,
        *,
        cannot_load: Sequence[PolicyVersion] = (),
        cannot_verify: bool = False,
        fails: dict[PolicyVersion, Exception] | None = None,
    ) -> None:
        self.go_on = threading.Event()
        self.loaded: list[PolicyVersion] = []
        self.is_closed = False
        self._cannot_load, self._cannot_verify = cannot_load, cannot_verify
        self._fails = fails or {}
        """The error of the check of a version."""

    def step(self) -> list[Completion]:
        self.go_on.wait()
        return []

    def load_weights(self, paths: Sequence[Path], version: PolicyVersion) -> None:
        self.loaded.append(version)
        if version in self._cannot_load:
            raise EngineError(f"no room for {version}")

    def verify(self, manifest: Any) -> None:
        if self._cannot_verify:
            raise DigestError("wrong digest")
        if self.loaded[-1] in self._fails:
            raise self._fails[self.loaded[-1]]

    def close(self) -> None:
        self.is_closed = True


async def test_a_step_that_never_comes_back_has_a_name_and_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_thread, "LONG_STEP_S", 0.02)
    waits, engine = WaitRegistry(), ScriptedEngine()
    thread = EngineThread(waits, timeout_s=0.4)
    asking = asyncio.ensure_future(thread.run(engine, EngineStep(None, []), OLD))  # pyright: ignore[reportArgumentType]
    while (wait := waits.current()) is None:
        assert not asking.done()
        await asyncio.sleep(0)  # every turn of the event loop, so that the wait cannot pass unseen
    assert wait.name == "engine-step"
    died = (await asking).died
    assert isinstance(died, EngineDiedError)
    assert "wait engine-step: the engine did not come back for 0.4 s" in str(died)
    assert waits.current() is None
    monkeypatch.setattr(engine_thread, "CLOSE_S", 0.02)
    await thread.close(engine)  # pyright: ignore[reportArgumentType]
    assert not engine.is_closed
    engine.go_on.set()


async def test_a_closed_engine_is_closed_in_its_own_thread_after_the_step_in_progress() -> None:
    engine = ScriptedEngine()
    thread = EngineThread(WaitRegistry(), timeout_s=60)
    step = asyncio.ensure_future(thread.run(engine, EngineStep(None, []), OLD))  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(thread.close(engine))  # pyright: ignore[reportArgumentType]
    engine.go_on.set()
    await closing
    assert engine.is_closed
    assert (await step).died is None


@pytest.mark.parametrize(
    ("broken", "refused", "died", "loaded"),
    [
        ({}, None, None, [V1]),
        ({"cannot_load": [V1]}, "no room for 1-4", None, [V1, START]),
        ({"cannot_verify": True}, "wrong digest", None, [V1, START]),
        ({"fails": {V1: IndexError("out of range")}}, "1-4: .* checked .IndexError: out of", None, [V1, START]),
        ({"fails": {V1: EngineDiedError("crashed")}}, "1-4: .* checked .EngineDiedError: crashed", None, [V1, START]),
        ({"fails": dict.fromkeys([V1, START], RuntimeError("device-side assert"))}, None,
         "1-4 was refused .*0-0 cannot be loaded again: device-side assert", [V1, START]),
        ({"cannot_load": [V1, START]}, None, "1-4 was refused .*no room for 1-4.*0-0 cannot be", [V1, START]),
        ({"cannot_load": [START], "cannot_verify": True}, None, "wrong digest.*0-0 cannot be loaded", [V1, START]),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_used_give_way_to_the_old_ones_or_else_the_engine_is_dead(
    broken: dict[str, Any], refused: str | None, died: str | None, loaded: list[PolicyVersion]
) -> None:
    engine = ScriptedEngine(**broken)
    engine.go_on.set()
    engine.num_active = 0
    result = run_step(engine, EngineStep(NEW, []), OLD)  # pyright: ignore[reportArgumentType]
    assert engine.loaded == loaded
    for found, wanted in ((result.swap_error, refused), (result.died, died)):
        assert (found is None) == (wanted is None)
        assert found is None or re.search(str(wanted), str(found))
