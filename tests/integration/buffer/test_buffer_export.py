"""GET /v1/rollouts.parquet: what is exported is what is stored, in bounded memory, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pyarrow.parquet as pq
import pytest
from redis import Redis
from tba_buffer.rollouts import parquet

from tba.clients import BufferClient
from tba.errors import BadRequestError, BusyError, NotFoundError, NotInstalledError, UnavailableError
from tba.versions import START, PolicyVersion
from tba.wire import Sampling, VersionSpan, encode_rollout
from tests.integration.buffer.test_buffer_conversations import talk
from tests.support.buffer import make_payloads, make_rollout
from tests.support.buffer_fixtures import BufferThread, ServeBuffer, without_constants
from tests.support.leases import draw
from tests.support.waits import until

TABLE = parquet.RolloutExports._table


@pytest.fixture
def served(serve_buffer: ServeBuffer) -> BufferThread:
    """A buffer with 12 plain rollouts, one that has everything, a conversation, and one without a reward."""
    served = serve_buffer()
    client, lineage = served.begin(4)
    client.push(make_payloads(["train-0", "train-1", "train-2"]))
    full = make_rollout(
        "train-3",
        reward=0.75,
        num_tokens=5,
        response_text="x" * 20_000 + "\N{CHECK MARK}",
        version_spans=(VersionSpan.of(START, 0, 2), VersionSpan.of(PolicyVersion(1, 0), 2, 5)),
        sampling=Sampling.of(0.5, top_p=0.9, top_k=40, seed=2**62, stop=("\n", "Q")),
        sampler_logprobs=np.array([-0.1, -0.2, -0.3, -0.4, -0.5], dtype=np.float32),
        reward_parts={"format": 1.0, "exact": 0.5},
    )
    client.push([encode_rollout(full)])
    client.push([encode_rollout(talk("train-2"))])
    client.push([encode_rollout(make_rollout("train-0", reward=None))])
    draw(client, lineage, wait_s=2)
    return served


def exported(client: BufferClient, folder: Path, **query: Any) -> list[dict[str, Any]]:
    path = folder / "out.parquet"
    num_bytes = client.export_rollouts(path, **query)
    assert path.stat().st_size == num_bytes
    assert [file.name for file in folder.iterdir()] == ["out.parquet"]
    return pq.read_table(path).to_pylist()


def num_evicted(path: Path) -> int:
    return int(pq.read_metadata(path).metadata[b"tba.num_evicted"])


def test_every_column_is_what_is_stored(served: BufferThread, tmp_path: Path) -> None:
    client = served.client()
    rows = exported(client, tmp_path)
    assert num_evicted(tmp_path / "out.parquet") == 0
    shown = client.list_rollouts(order="oldest", limit=100).rollouts
    assert [row["rollout_id"] for row in rows] == [info.rollout_id for info in shown]
    for row in rows:
        found = client.get_rollout(row["rollout_id"]).model_dump()
        assert f"{row.pop('lineage')}-{row.pop('step')}" == found["version"]
        assert json.loads(row.pop("prompt_data")) == {"answer": 2 * int(row["prompt_id"][-1])}
        assert row == {name: found[name] for name in row}
    full, spoken = rows[12:14]
    assert (len(spoken["sequences"]), len(spoken["messages"]), full["sequences"]) == (2, 2, None)
    assert (full["response_text"], full["prompt_text"]) == ("x" * 20_000 + "\N{CHECK MARK}", "3+3=")
    assert full["reward_parts"][1] == {"name": "exact", "score": 0.5, "weight": None}
    assert full["response_tokens"] == [1, 2, 3, 4, 5]
    assert rows[14]["reward"] is None
    assert sum(row["num_batches"] for row in rows) > 0


def test_filters_choose_and_tokens_may_be_left_out(served: BufferThread, tmp_path: Path) -> None:
    client = served.client()
    rows = exported(client, tmp_path, tokens=False, prompt_id="train-3")
    assert [row["reward"] for row in rows] == [0.75]
    assert not {"prompt_tokens", "response_tokens", "sampler_logprobs", "sequences"} & rows[0].keys()
    assert [row["reward"] for row in exported(client, tmp_path, min_reward=2, contains="0+0=")] == [2.0, 3.0]
    assert exported(client, tmp_path, searcher_id="nobody") == []


def test_a_row_group_is_written_at_a_time(
    served: BufferThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_constants(monkeypatch, {"GROUP_ROLLOUTS": 5, "CHUNK_ROLLOUTS": 3})
    path = tmp_path / "out.parquet"
    served.client().export_rollouts(path)
    metadata = pq.ParquetFile(path).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [6, 6, 3]


def test_what_is_damaged_is_shown_as_such_and_what_is_gone_is_left_out(
    served: BufferThread, raw: Redis, tmp_path: Path
) -> None:
    client = served.client()
    ids = [info.rollout_id for info in client.list_rollouts(order="oldest", limit=100).rollouts]
    raw.hset("tba:test:payloads", bytes.fromhex(ids[1]), b"\x00junk")  # pyright: ignore[reportArgumentType]
    raw.hdel("tba:test:payloads", bytes.fromhex(ids[2]))  # pyright: ignore[reportArgumentType]
    rows = exported(client, tmp_path)
    assert [row["rollout_id"] for row in rows] == [*ids[:2], *ids[3:]]
    assert (rows[1]["reward_status"], rows[1]["response_tokens"]) == ("failed", [])
    assert num_evicted(tmp_path / "out.parquet") == 1
    exported(client, tmp_path, contains="+")
    assert num_evicted(tmp_path / "out.parquet") == 1


def test_a_cut_export_leaves_no_file(served: BufferThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.parquet"
    path.write_bytes(b"of yesterday")
    without_constants(monkeypatch, {"GROUP_ROLLOUTS": 5, "CHUNK_ROLLOUTS": 3})
    write, calls = parquet.RolloutExports._table, []

    def fails_later(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise UnavailableError("Redis went away")
        return write(*args)

    monkeypatch.setattr(parquet.RolloutExports, "_table", fails_later)
    with pytest.raises(UnavailableError):
        served.client().export_rollouts(path)
    assert [file.name for file in tmp_path.iterdir()] == ["out.parquet"]
    assert path.read_bytes() == b"of yesterday"
    monkeypatch.setattr(parquet.RolloutExports, "_table", write)
    served.client().export_rollouts(path)
    assert pq.read_table(path).num_rows == 15


def test_refusals_say_why_without_a_file(served: BufferThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, path = served.client(), tmp_path / "out.parquet"
    with pytest.raises(NotFoundError, match="prompt_id 'nothing' was never uploaded"):
        client.export_rollouts(path, prompt_id="nothing")
    with pytest.raises(BadRequestError, match="is above max_reward"):
        client.export_rollouts(path, min_reward=2, max_reward=1)
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "MAX_EXPORTS", 0)
        with pytest.raises(BusyError, match="0 exports run already"):
            client.export_rollouts(path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)  # python marks a missing module so
        with pytest.raises(NotInstalledError, match=r"needs pyarrow.*install its extra `parquet`"):
            client.export_rollouts(path)
        reply = httpx2.get(f"{served.url}/v1/rollouts.parquet")
        assert (reply.status_code, reply.json()["type"]) == (501, "urn:tba:problem:not-installed")
    assert list(tmp_path.iterdir()) == []
    reply = httpx2.get(f"{served.url}/v1/rollouts.parquet?prompt_id=train-3")
    assert (reply.headers["content-type"], reply.content[-4:]) == ("application/vnd.apache.parquet", b"PAR1")


@pytest.mark.parametrize("reader", ["hangs up", "sleeps"])
def test_an_export_that_nobody_reads_makes_room_for_the_next(
    serve_buffer: ServeBuffer, tmp_path: Path, reader: str
) -> None:
    constants = {"MAX_EXPORTS": 1, "GROUP_ROLLOUTS": 1, "CHUNK_ROLLOUTS": 1}
    served = serve_buffer(buffer={**constants, "READ_S": 0.5 if reader == "sleeps" else 60.0})
    served.hold_little()
    client = served.with_prompts(1)
    logprobs = -np.random.default_rng(0).random(100_000, dtype=np.float32)
    for _ in range(20):
        client.push([encode_rollout(make_rollout(num_tokens=100_000, sampler_logprobs=logprobs))])

    def is_written() -> bool:
        with contextlib.suppress(BusyError):
            return client.export_rollouts(tmp_path / "out.parquet") > 0
        return False

    with httpx2.stream("GET", f"{served.url}/v1/rollouts.parquet", timeout=60) as reply:
        pieces = reply.iter_raw()  # kept: without its reader httpx closes the connection
        assert next(pieces)[:4] == b"PAR1"
        if reader == "sleeps":
            until("another export is let in", is_written)
            with pytest.raises(httpx2.RemoteProtocolError):
                list(pieces)  # cut off, and not ended
        else:
            assert not is_written()
    until("the first export ends", is_written)
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 20


async def test_a_deadline_that_its_rows_missed_is_not_taken_for_that_of_its_reader() -> None:
    async def rows() -> AsyncIterator[bytes]:
        yield b"PAR1"
        raise TimeoutError("rows")

    async def send(message: Any) -> None:
        pass

    with pytest.raises(TimeoutError, match="rows"):
        await parquet.ExportResponse(rows()).stream_response(send)


def test_requests_that_come_at_once_are_all_counted(served: BufferThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_EXPORTS", 1)
    refused = threading.Event()
    monkeypatch.setattr(parquet.RolloutExports, "_table", lambda self, *args: refused.wait(60) and TABLE(self, *args))
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(httpx2.get, f"{served.url}/v1/rollouts.parquet", timeout=60) for _ in range(6)]
        until("five have their answers", lambda: sum(reply.done() for reply in asked) == 5)
        refused.set()
        replies = [reply.result() for reply in asked]
    assert sorted(reply.status_code for reply in replies) == [200, 429, 429, 429, 429, 429]
    assert next(reply for reply in replies if reply.status_code == 200).content[-4:] == b"PAR1"
