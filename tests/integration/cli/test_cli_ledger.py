"""`tba ledger check` against a real buffer, with a ledger written by draws and acks, and with ones that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from redis import Redis
from tba_buffer.snapshots.load import OriginDocument

from tba.api import AckRequest, BatchRequest, LineageReply
from tba.clients import BufferClient
from tba.versions import PolicyVersion
from tba_cli.commands.report import EXIT_VIOLATION, check_command
from tba_cli.parser import parse_arguments
from tests.support.buffer import make_payloads, make_prompts, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.redis_process import RedisProcess

LEDGER = "tba:test:ledger"


def take_steps(client: BufferClient, lineage: LineageReply, steps: range) -> None:
    for step in steps:
        request = BatchRequest(trainer_id="t", lineage=lineage.lineage, step=step, token=lineage.token)
        batch = client.draw_batch(request)
        client.ack(batch.batch_id, AckRequest(lineage=lineage.lineage, step=step, token=lineage.token))


@pytest.fixture
def resumed(serve_buffer: ServeBuffer) -> BufferThread:
    """Lineage 1 took steps 1 to 5; lineage 2 continued from step 3 and took 4 to 7."""
    buffer = serve_buffer()
    client = buffer.client()
    client.upload_prompts(make_prompts(8))
    client.push(make_payloads([f"train-{i}" for i in range(8)], per_prompt=6))
    take_steps(client, start_lineage(client), range(1, 6))
    take_steps(client, start_lineage(client, PolicyVersion(1, 3)), range(4, 8))
    return buffer


def check(buffer: BufferThread) -> int:
    return check_command(parse_arguments(["ledger", "check", "--url", buffer.url]))


def test_a_resumed_run_keeps_the_promise(resumed: BufferThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(resumed) == 0
    assert capsys.readouterr().out == (
        "ledger of 'test': every step of the active lineage exactly once "
        "(7 steps, 9 batches, 2 of them abandoned, 0 skipped, trainer starts: 2, active lineage 2)\n"
    )


def edit(line: dict, **changes: object) -> str:
    return json.dumps({**line, **changes})


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda c, lines: c.lrem(LEDGER, 1, lines[2]), "step 2 is missing"),
        (lambda c, lines: c.hset("tba:test:run", "step", 8), "step 8 is missing"),
    ],
)
def test_a_ledger_that_breaks_it_is_told_apart(
    resumed: BufferThread,
    redis: RedisProcess,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Redis, list[bytes]], object],
    sentence: str,
) -> None:
    with Redis.from_url(redis.url) as connection:
        damage(connection, connection.lrange(LEDGER, 0, -1))  # pyright: ignore[reportArgumentType]
    assert check(resumed) == EXIT_VIOLATION
    assert sentence in capsys.readouterr().out


def test_the_lineages_of_the_run_that_was_forked_have_no_lines(
    resumed: BufferThread, redis: RedisProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = OriginDocument("other/end", "1-3", "0" * 64, None, num_rollouts=0, lineage=1, last=0)
    with Redis.from_url(redis.url) as connection:
        connection.ltrim(LEDGER, 6, -1)
        connection.hset("tba:test:run", mapping={"origin": msgspec.json.encode(origin), "origin_cursor": 0})
    assert check(resumed) == 0
    assert "trainer starts: 1, active lineage 2, forked from 1-3 of another run)" in capsys.readouterr().out


def test_a_long_ledger_is_read_in_pages(
    resumed: BufferThread, redis: RedisProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    num_steps = 3000
    with Redis.from_url(redis.url) as connection:
        last = json.loads(connection.lindex(LEDGER, -1))  # pyright: ignore[reportArgumentType]
        more = [edit(last, step=step, batch_id=f"b-{step}") for step in range(8, num_steps + 1)]
        connection.rpush(LEDGER, *more)
        connection.hset("tba:test:run", "step", num_steps)
    assert check(resumed) == 0
    assert f"({num_steps} steps, {num_steps + 2} batches, 2 of them abandoned" in capsys.readouterr().out
