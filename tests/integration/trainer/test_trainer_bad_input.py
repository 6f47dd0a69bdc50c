"""A trainer on a real buffer whose stored rollouts are bad in every way: refused, counted, training continues.

Rollouts that nobody can read fail in the buffer with the ack that names them: test_buffer_damage.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from redis import Redis
from safetensors.torch import load_file
from tba_trainer.trainer import train

import tba.wire.rollout
from tba.api import AckRequest, BatchRequest, LedgerEntry
from tba.clients import BufferClient
from tba.errors import BadRequestError
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Rollout, VersionSpan, encode_rollout
from tba_cli.commands.report import check_command
from tba_cli.parser import parse_arguments
from tba_cli.reports.ledger import batch_entries
from tests.support.buffer import make_payloads, make_prompts, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.redis_process import RedisProcess
from tests.support.rollout_values import replace
from tests.support.trainer_values import VOCAB_SIZE, make_rollout, recipe_of_buffer
from tests.support.waits import until

PAYLOADS = "tba:test:payloads"


def span(version: PolicyVersion, rollout: Rollout) -> tuple[VersionSpan, ...]:
    return (VersionSpan.of(version, 0, len(rollout.response_tokens)),)


def changed(payload: bytes, **fields: Any) -> bytes:
    return msgpack.packb({**msgpack.unpackb(payload), **fields})  # pyright: ignore[reportReturnType]


def damages(good: Rollout) -> dict[str, bytes]:
    """Reason -> what such a rollout became in Redis."""
    return {
        "vocabulary": encode_rollout(replace(good, prompt_tokens=np.array([VOCAB_SIZE], dtype=np.int32))),
        "too-long": encode_rollout(replace(good, prompt_tokens=np.full(600, 5, dtype=np.int32))),
        "future-version": encode_rollout(replace(good, version_spans=span(PolicyVersion(1, 10**6), good))),
        "unknown-version": encode_rollout(replace(good, version_spans=span(PolicyVersion(9, 1), good))),
        "no-reward": encode_rollout(replace(good, reward=None, reward_status="pending", reward_version=None)),
    }


@pytest.fixture
def buffer(serve_buffer: ServeBuffer) -> BufferThread:
    return serve_buffer(sampling={"prompts_per_batch": 8, "group_size": 4})


def fill(client: BufferClient, connection: Redis, damaged: Sequence[tuple[bytes, int]], *, seed: int = 0) -> None:
    """8 prompts of 4 rollouts each. So many rollouts of the first prompts become this once they are stored."""
    rng = np.random.default_rng(seed)
    client.upload_prompts(make_prompts(8, 4))
    for number in range(8):
        rollouts = [make_rollout(rng, prompt_id=f"train-{number}", run="test", reward=float(i % 2)) for i in range(4)]
        client.push([encode_rollout(rollout) for rollout in rollouts])
        if number < len(damaged):
            bad, num = damaged[number]
            for rollout in rollouts[:num]:
                own = changed(bad, rollout_id=rollout.rollout_id, prompt_id=rollout.prompt_id)
                connection.hset(PAYLOADS, rollout.rollout_id, own)  # pyright: ignore[reportArgumentType]


def entries(client: BufferClient) -> list[LedgerEntry]:
    return batch_entries(client.ledger().entries)


def test_every_kind_of_bad_rollout_is_refused_and_counted_while_training_continues(
    buffer: BufferThread, redis: RedisProcess, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, store = buffer.client(), FileStore(tmp_path / "store")
    bad = damages(make_rollout(np.random.default_rng(1), run="test"))
    with Redis.from_url(redis.url) as connection:
        fill(client, connection, [*((payload, 1) for payload in bad.values()), (bad["vocabulary"], 3)])
    recipe = recipe_of_buffer(buffer.recipe, model, num_steps=6, export=False)
    train(recipe, buffer=client, store=store, stop=threading.Event())
    assert client.run().state == "done"
    lines = entries(client)
    assert [(line.step, line.skipped) for line in lines] == [(step, None) for step in range(1, 7)]
    # a batch has every prompt: one bad rollout of each kind, and one prompt of which only one is good
    expected = {**dict.fromkeys(bad, 1), "vocabulary": 1 + 3, "group-of-one": 1}
    assert [line.refused for line in lines] == [dict(sorted(expected.items()))] * 6
    stats = client.stats()
    assert stats.rollouts_refused_by_trainer == {reason: 6 * number for reason, number in expected.items()}
    assert stats.rollouts_trained == 6 * (32 - sum(expected.values()))
    tokens = stats.tokens
    assert tokens is not None
    # every good rollout is in every batch
    assert 0 < tokens.trained < 6 * tokens.generated
    assert sum(stats.policy_age_histogram.values()) == stats.rollouts_trained
    assert stats.trained_steps == {"kept": 6, "dropped": 0}
    details = [client.get_rollout(info.rollout_id) for info in client.list_rollouts(limit=100).rollouts]
    trained = [detail.trained for detail in details if detail.trained]
    # every good rollout is in every batch, and the others in none
    assert [[step.version for step in steps] for steps in trained] == [[f"1-{n}" for n in range(1, 7)]] * (
        32 - sum(expected.values())
    )
    assert all(step.advantage is not None and step.weight == 1.0 for steps in trained for step in steps)
    assert any(step.advantage for steps in trained for step in steps)
    assert check_command(parse_arguments(["ledger", "check", "--url", buffer.url])) == 0
    assert "6 batches, 0 of them abandoned, 0 skipped" in capsys.readouterr().out
    versions = WeightVersions(store, "test")
    paths = versions.download_tensors(PolicyVersion(1, 6), tmp_path / "last").paths
    assert all(torch.isfinite(tensor).all() for path in paths for tensor in load_file(path).values())


def test_unreadable_batches_are_skipped(buffer: BufferThread, redis: RedisProcess, model: Path, tmp_path: Path) -> None:
    client, store = buffer.client(), FileStore(tmp_path / "store")
    unreadable = changed(encode_rollout(make_rollout(np.random.default_rng(1), run="test")), surprise=1)
    with Redis.from_url(redis.url) as connection:
        fill(client, connection, [(unreadable, 4)] * 8)
        training = threading.Thread(
            target=train,
            args=(recipe_of_buffer(buffer.recipe, model, num_steps=6, export=False),),
            kwargs={"buffer": buffer.client(), "store": store, "stop": threading.Event()},
        )
        training.start()
        until("all have failed", lambda: client.stats().num_failed == 32)
        fill(client, connection, [], seed=1)
    training.join()
    assert client.run().state == "done"
    lines = entries(client)
    assert [line.step for line in lines] == list(range(1, 7))
    # the batch of step 2 may have been drawn before the ack of step 1
    skipped = [line for line in lines if line.skipped]
    assert len(skipped) in (1, 2)
    assert all(line.refused == {"malformed": 32} for line in skipped)
    assert [line.refused for line in lines if not line.skipped] == [{}] * (6 - len(skipped))


def test_a_rollout_is_decoded_once_at_its_push_and_once_in_the_trainer_for_each_use(
    buffer: BufferThread, redis: RedisProcess, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, decoded = tba.wire.rollout._DECODER, Counter[str]()

    class CountingDecoder:
        def decode(self, data: bytes) -> Any:
            rollout: Any = decoder.decode(data)
            decoded[rollout.rollout_id.hex()] += 1
            return rollout

    monkeypatch.setattr(tba.wire.rollout, "_DECODER", CountingDecoder())
    client, store = buffer.client(), FileStore(tmp_path / "store")
    with Redis.from_url(redis.url) as connection:
        fill(client, connection, [])
    recipe = recipe_of_buffer(buffer.recipe, model, num_steps=6, export=False)
    train(recipe, buffer=client, store=store, stop=threading.Event())
    uses = Counter(rollout_id for line in entries(client) for rollout_id in line.rollout_ids)
    assert uses.total() == 6 * 32
    assert decoded == uses + Counter(dict.fromkeys(uses, 1))


def test_the_ack_of_a_skipped_batch_counts_nothing_as_trained_and_has_to_fit(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(8))
    lineage = start_lineage(client)
    client.push(make_payloads([f"train-{i}" for i in range(8)], per_prompt=6))

    def ack(step: int, **fields: Any) -> None:
        batch = client.draw_batch(BatchRequest(trainer_id="t", lineage=1, step=step, token=lineage.token))
        client.ack(batch.batch_id, AckRequest(lineage=1, step=step, token=lineage.token, **fields))

    for wrong in (
        {"policy_ages": [0] * 15, "refused": {"too-long": 2}},
        {"policy_ages": [0] * 16, "refused": {"too-long": 1}},
        {"refused": {"too-long": 17}, "skipped": "refused"},
    ):
        with pytest.raises(BadRequestError, match=r"has 16 rollouts, the ack has \d+ policy ages and \d+ refused"):
            ack(1, **wrong)
    with pytest.raises(
        BadRequestError, match=r"all 16 rollouts of batch .* were refused, so its step must be a skipped"
    ):
        ack(1, refused={"too-long": 16})
    with pytest.raises(BadRequestError, match=r"says 49 trained tokens, and the batch has 48"):
        ack(1, policy_ages=[0] * 16, num_tokens=49)
    ack(1, policy_ages=[0] * 14, refused={"too-long": 1, "vocabulary": 1}, num_tokens=42)
    ack(2, policy_ages=[0] * 16, skipped="non_finite")
    ack(3, refused={"too-long": 16}, skipped="refused")
    stats = client.stats()
    assert stats.tokens is not None
    assert stats.tokens.trained == 42
    assert (stats.rollouts_trained, stats.policy_age_histogram) == (14, {0: 14})
    assert stats.batches_skipped == {"non_finite": 1, "refused": 1}
    assert stats.rollouts_refused_by_trainer == {"too-long": 17, "vocabulary": 1}
    assert Counter(line.skipped for line in entries(client)) == {None: 1, "non_finite": 1, "refused": 1}
    assert entries(client)[0].refused == {"too-long": 1, "vocabulary": 1}
