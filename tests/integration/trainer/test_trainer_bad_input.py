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


class Run:
    """A trainer of six steps on a real buffer, whose batches have 8 prompts of 4 rollouts each."""

    def __init__(self, buffer: BufferThread, redis: RedisProcess, model: Path, folder: Path) -> None:
        self.buffer, self.client, self.store = buffer, buffer.client(), FileStore(folder / "store")
        self.redis_url, self.folder = redis.url, folder
        self.recipe = recipe_of_buffer(buffer.recipe, model, num_steps=6, export=False)

    def fill(self, damaged: Sequence[tuple[bytes, int]] = (), *, seed: int = 0) -> None:
        """So many rollouts of the first prompts become this once they are stored."""
        rng = np.random.default_rng(seed)
        self.client.upload_prompts(make_prompts(8, 4))
        for number in range(8):
            bad, num = damaged[number] if number < len(damaged) else (b"", 0)
            rewards, prompt_id = (0.0, 1.0, 0.0, 1.0), f"train-{number}"
            rollouts = [make_rollout(rng, prompt_id=prompt_id, run="test", reward=reward) for reward in rewards]
            self.client.push([encode_rollout(rollout) for rollout in rollouts])
            for rollout in rollouts[:num]:
                own = changed(bad, rollout_id=rollout.rollout_id, prompt_id=prompt_id)
                with Redis.from_url(self.redis_url) as connection:
                    connection.hset(PAYLOADS, rollout.rollout_id, own)  # pyright: ignore[reportArgumentType]

    def train(self) -> None:
        train(self.recipe, buffer=self.buffer.client(), store=self.store, stop=threading.Event())

    def lines(self) -> list[LedgerEntry]:
        return batch_entries(self.client.ledger().entries)


@pytest.fixture
def run(serve_buffer: ServeBuffer, redis: RedisProcess, model: Path, tmp_path: Path) -> Run:
    return Run(serve_buffer(sampling={"prompts_per_batch": 8, "group_size": 4}), redis, model, tmp_path)


def test_every_kind_of_bad_rollout_is_refused_and_counted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    client, bad = run.client, damages(make_rollout(np.random.default_rng(1), run="test"))
    run.fill([*((payload, 1) for payload in bad.values()), (bad["vocabulary"], 3)])
    run.train()
    assert client.run().state == "done"
    lines = run.lines()
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
    versions, num_good = [f"1-{n}" for n in range(1, 7)], 32 - sum(expected.values())
    assert [[step.version for step in steps] for steps in trained] == [versions] * num_good
    assert all(step.advantage is not None and step.weight == 1.0 for steps in trained for step in steps)
    assert any(step.advantage for steps in trained for step in steps)
    assert check_command(parse_arguments(["ledger", "check", "--url", run.buffer.url])) == 0
    assert "6 batches, 0 of them abandoned, 0 skipped" in capsys.readouterr().out
    paths = WeightVersions(run.store, "test").download_tensors(PolicyVersion(1, 6), run.folder / "last").paths
    assert all(torch.isfinite(tensor).all() for path in paths for tensor in load_file(path).values())


def test_unreadable_batches_are_skipped(run: Run) -> None:
    unreadable = changed(encode_rollout(make_rollout(np.random.default_rng(1), run="test")), surprise=1)
    run.fill([(unreadable, 4)] * 8)
    training = threading.Thread(target=run.train)
    training.start()
    until("all have failed", lambda: run.client.stats().num_failed == 32)
    run.fill(seed=1)
    training.join()
    assert run.client.run().state == "done"
    lines = run.lines()
    assert [line.step for line in lines] == list(range(1, 7))
    # the batch of step 2 may have been drawn before the ack of step 1
    skipped = [line for line in lines if line.skipped]
    assert len(skipped) in (1, 2)
    assert all(line.refused == {"malformed": 32} for line in skipped)
    assert [line.refused for line in lines if not line.skipped] == [{}] * (6 - len(skipped))


def test_a_rollout_is_decoded_once_at_its_push_and_once_for_each_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, decoded = tba.wire.rollout._DECODER, Counter[str]()

    class CountingDecoder:
        def decode(self, data: bytes) -> Any:
            rollout: Any = decoder.decode(data)
            decoded[rollout.rollout_id.hex()] += 1
            return rollout

    monkeypatch.setattr(tba.wire.rollout, "_DECODER", CountingDecoder())
    run.fill()
    run.train()
    uses = Counter(rollout_id for line in run.lines() for rollout_id in line.rollout_ids)
    assert (uses.total(), decoded) == (6 * 32, uses + Counter(dict.fromkeys(uses, 1)))


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
    sentence = r"all 16 rollouts of batch .* were refused, so its step must be a skipped"
    with pytest.raises(BadRequestError, match=sentence):
        ack(1, refused={"too-long": 16})
    with pytest.raises(BadRequestError, match=r"says 49 trained tokens, and the batch has 48"):
        ack(1, policy_ages=[0] * 16, num_tokens=49)
    ack(1, policy_ages=[0] * 14, refused={"too-long": 1, "vocabulary": 1}, num_tokens=42)
    ack(2, policy_ages=[0] * 16, skipped="non_finite")
    ack(3, refused={"too-long": 16}, skipped="refused")
    stats = client.stats()
    assert stats.tokens is not None
    assert (stats.tokens.trained, stats.rollouts_trained, stats.policy_age_histogram) == (42, 14, {0: 14})
    assert stats.batches_skipped == {"non_finite": 1, "refused": 1}
    assert stats.rollouts_refused_by_trainer == {"too-long": 17, "vocabulary": 1}
    lines = batch_entries(client.ledger().entries)
    assert Counter(line.skipped for line in lines) == {None: 1, "non_finite": 1, "refused": 1}
    assert lines[0].refused == {"too-long": 1, "vocabulary": 1}
