"""`tba ledger check` against a real buffer, with a ledger written by draws and acks, and with ones that are wrong."""

from __future__ import annotations

import json

import pytest
from redis import Redis

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


def test_the_whole_ledger_is_checked_page_by_page_and_what_is_missing_is_told(
    resumed: BufferThread, redis: RedisProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """What else contradicts itself: tests/unit/cli/test_reports_ledger.py."""
    assert check(resumed) == 0
    assert capsys.readouterr().out == (
        "ledger of 'test': every step of the active lineage exactly once "
        "(7 steps, 9 batches, 2 of them abandoned, 0 skipped, trainer starts: 2, active lineage 2)\n"
    )
    num_steps = 3000
    with Redis.from_url(redis.url) as connection:
        last = json.loads(connection.lindex(LEDGER, -1))  # pyright: ignore[reportArgumentType]
        more = [json.dumps({**last, "step": step, "batch_id": f"b-{step}"}) for step in range(8, num_steps + 1)]
        connection.rpush(LEDGER, *more)
        connection.hset("tba:test:run", "step", num_steps)
    assert check(resumed) == 0
    assert f"({num_steps} steps, {num_steps + 2} batches, 2 of them abandoned" in capsys.readouterr().out
    with Redis.from_url(redis.url) as connection:
        connection.lrem(LEDGER, 1, connection.lindex(LEDGER, 2))  # pyright: ignore[reportArgumentType]
        connection.hset("tba:test:run", "step", num_steps + 1)
    assert check(resumed) == EXIT_VIOLATION
    out = capsys.readouterr().out
    assert "step 2 is missing" in out
    assert f"step {num_steps + 1} is missing" in out
