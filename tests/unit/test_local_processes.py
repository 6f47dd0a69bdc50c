"""What is said of a child that ended although the run is not over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tba.errors import ChildError
from tba_cli.local.processes import ProcessManager


class FakeChild(SimpleNamespace):
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


async def not_over() -> bool:
    return False


def end_of_a_trainer(code: int, folder: Path) -> None:
    """A manager sees that its trainer has ended, without a word."""
    processes = ProcessManager(
        folder=cast("Any", SimpleNamespace(path=folder, log_path=lambda name: Path(f"{name}.log"))),
        console=cast("Any", None),
        reaper=cast("Any", None),
        is_over=not_over,
        max_searcher_restarts=0,
        stop_timeout_s=1.0,
    )

    async def watch() -> None:
        exit_code = asyncio.get_running_loop().create_future()
        exit_code.set_result(code)
        child = cast("Any", FakeChild(name="trainer", tail=[], exit_code=exit_code))
        processes._ended.put_nowait(child)
        await processes.watch()

    asyncio.run(watch())


@pytest.mark.parametrize(
    ("code", "sentence"),
    [(143, r"^trainer was stopped \(SIGTERM\) before the run was over"), (-9, r"^trainer died \(killed by SIGKILL\)")],
)
def test_a_trainer_that_was_told_to_stop_did_not_die(code: int, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=sentence):
        end_of_a_trainer(code, tmp_path)


def test_a_child_that_dies_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=1_000_000, used=999_500, free=500)
    monkeypatch.setattr("tba.store.file.shutil.disk_usage", lambda path: usage)
    with pytest.raises(
        ChildError, match=r"trainer.log; the disk at /.* is full: 500 of 1,000,000 bytes are free there \(folder "
    ):
        end_of_a_trainer(1, tmp_path)
