"""`tba scale` with `tba run`: searchers come and go while the run trains. Trainer and searchers are stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from tba.api import ScaleRequest, SearchersInfo
from tba.clients import BufferClient
from tba.tokens import role_token
from tba_cli.local.processes import MAX_SEARCHER_RESTARTS
from tests.integration.cli.test_local_real_services import place
from tests.support.local_workplace import DEADLINE_S, Workplace, wait_until

__all__ = ["place"]


def searchers(place: Workplace) -> dict[str, int]:
    """Name -> process of every searcher that runs now."""
    found = {}
    for pid in place.children():
        try:
            environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except OSError:
            continue
        found |= {item.partition("=")[2]: pid for item in environ if item.startswith("TBA_SEARCHER_ID=")}
    return found


def is_running(place: Workplace, *numbers: int) -> bool:
    return sorted(searchers(place)) == [f"searcher-{number}" for number in numbers]


def client_of(place: Workplace) -> BufferClient:
    endpoints = json.loads((place.folder / "endpoints.json").read_text())
    return BufferClient(endpoints["buffer_url"], token=role_token(endpoints["tokens_file"], "operator"), retry_s=20.0)


def scale(place: Workplace, num: int | None) -> SearchersInfo:
    with contextlib.closing(client_of(place)) as client:
        return client.scale(ScaleRequest(num_searchers=num)).searchers


def lineage(place: Workplace) -> int:
    with contextlib.closing(client_of(place)) as client:
        return client.run().lineage


def test_searchers_are_started_and_stopped_while_the_run_continues_and_after_a_resume(place: Workplace) -> None:
    words = ["--set", "trainer.export=false"]
    started = place.start(*words, FAKE_TRAINER="no-steps")
    wait_until("two searchers", lambda: is_running(place, 0, 1))
    first = searchers(place)
    assert "searchers: 4 desired" in place.tba("scale", "4", "--reason", "more").stdout
    wait_until("four searchers", lambda: is_running(place, 0, 1, 2, 3))
    scale(place, 1)
    wait_until("one searcher", lambda: is_running(place, 0))
    assert searchers(place)["searcher-0"] == first["searcher-0"]  # the highest numbers went
    scale(place, 2)
    wait_until("another second one", lambda: is_running(place, 0, 1))

    # crashes count as before: some are forgiven, the next is not, until the next request
    for _ in range(MAX_SEARCHER_RESTARTS):
        killed = searchers(place)["searcher-0"]
        os.kill(killed, signal.SIGKILL)
        wait_until("another one", lambda killed=killed: searchers(place).get("searcher-0") not in (None, killed))
    os.kill(searchers(place)["searcher-1"], signal.SIGKILL)
    wait_until("searcher-1 is given up", lambda: is_running(place, 0))
    scale(place, 3)
    wait_until("three again", lambda: is_running(place, 0, 1, 2))

    os.kill(started.pid, signal.SIGTERM)
    out, err = started.communicate(timeout=DEADLINE_S)
    assert (started.returncode, err) == (130, "")
    assert out.count("starting it again") == MAX_SEARCHER_RESTARTS
    for line in ("searchers: 2 -> 4", "searchers: 4 -> 1", "the run continues with 1", "searchers: 2 -> 3"):
        assert line in out
    assert place.children() == []

    resumed = place.start("--resume", *words, FAKE_TRAINER="no-steps")
    wait_until("three searchers", lambda: is_running(place, 0, 1, 2))
    wait_until("the lineage", lambda: lineage(place) == 2)
    found = scale(place, None)
    assert (found.desired, found.source) == (2, "recipe")
    wait_until("two searchers", lambda: is_running(place, 0, 1))
    scale(place, 0)
    wait_until("no searcher", lambda: is_running(place))
    assert place.tba("stop").returncode == 0
    out, err = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, out + err
    assert [change["new"] for change in _audit(place)] == [4, 1, 2, 3, None, 0]


def _audit(place: Workplace) -> list[dict]:
    """The lines of the audit, from the append-only file that the run left."""
    from redis import Redis

    from tests.support.redis_process import RedisProcess, free_port

    redis = RedisProcess(folder=place.folder / "redis", port=free_port())
    redis.start()
    try:
        with Redis.from_url(redis.url) as client:
            lines: list[bytes] = client.lrange("tba:demo:scaling_changes", 0, -1)  # pyright: ignore[reportAssignmentType]
        return [json.loads(line) for line in lines]
    finally:
        redis.stop()
