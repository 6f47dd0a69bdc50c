"""Child processes of a local run, and their ports."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tba.errors import ChildError, ConfigError
from tba_cli.local.processes import ProcessManager, ProcessSpec
from tba_cli.ports import PortRequest, choose_ports

# ---- The message about a child that ended before the run was over ---------------------------------------------------


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
        stop_timeout_s=1.0,
    )

    async def watch() -> None:
        exit_code = asyncio.get_running_loop().create_future()
        exit_code.set_result(code)
        spec = ProcessSpec(name="trainer", kind="trainer", command=[], environ={})
        child = cast("Any", FakeChild(name="trainer", spec=spec, tail=[], exit_code=exit_code))
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
