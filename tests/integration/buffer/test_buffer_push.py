"""The contract of push: one outcome per item, idempotent, durable before it is acknowledged, bounded."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from redis import Redis

from tba.api import LeaseRequest, PushReply
from tba.clients import BufferClient
from tba.errors import UnavailableError
from tba.versions import PolicyVersion
from tba.wire import MAX_ROLLOUTS_PER_PUSH, encode_rollout
from tba.wire.codec import pack
from tests.support.buffer import make_payloads, make_prompts, make_rollout
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.leases import draw, wait_of
from tests.support.waits import DEADLINE_S


def outcomes(reply: PushReply) -> list[str]:
    return [outcome.outcome for outcome in reply.outcomes]


def test_the_same_push_again_stores_nothing_twice(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().with_prompts(3)
    payloads = make_payloads(["train-0", "train-1"])
    assert outcomes(client.push(payloads)) == ["new"] * 8
    before = client.stats()
    assert outcomes(client.push(payloads)) == ["duplicate"] * 8
    (third,) = make_payloads(["train-2"], per_prompt=1)
    assert outcomes(client.push([payloads[0], payloads[0], third])) == ["duplicate", "duplicate", "new"]
    after = client.stats()
    assert (before.num_rollouts, after.num_rollouts) == (8, 9)
    assert after.pushed == {"new": 9, "duplicate": 10, "refused": 0}
    assert after.payload_bytes == sum(map(len, payloads)) + len(third)


def test_an_id_that_occurs_twice_in_one_push_is_stored_once(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().with_prompts(1)
    rollout = make_rollout()
    first, other = encode_rollout(rollout), encode_rollout(make_rollout(rollout_id=rollout.rollout_id, reward=2.0))
    reply = client.push([first, first, other, encode_rollout(make_rollout())])
    assert outcomes(reply) == ["new", "duplicate", "refused", "new"]
    assert (reply.outcomes[2].reason or "").startswith("conflict: ")
    stats = client.stats()
    assert (stats.num_rollouts, stats.pushed) == (2, {"new": 2, "duplicate": 1, "refused": 1})


def test_a_push_of_the_largest_number_of_rollouts_with_a_visit_each(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer(sampling={"rollouts_per_visit": 1}).begin(600)
    leases = [lease for _ in range(8) for lease in client.lease(LeaseRequest(searcher_id="s", max_leases=64)).leases]
    assert len(leases) == MAX_ROLLOUTS_PER_PUSH
    payloads = [
        encode_rollout(make_rollout(lease.prompt.prompt_id, visit_id=lease.visit_id, searcher_id="s"))
        for lease in leases
    ]
    for outcome in ("new", "duplicate"):
        assert outcomes(client.push(payloads)) == [outcome] * MAX_ROLLOUTS_PER_PUSH
    stats = client.stats()
    assert (stats.num_rollouts, stats.leases["fulfilled"], stats.leases["open"]) == (512, 512, 0)


def test_many_searchers_pushing_the_same_rollouts_at_once_store_each_once(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    buffer.client().upload_prompts(make_prompts(4))
    payloads = make_payloads([f"train-{i}" for i in range(4)], per_prompt=32)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: buffer.client().push(payloads), range(8)))
    assert sum(outcomes(reply).count("new") for reply in replies) == 128
    assert buffer.client().stats().num_rollouts == 128


def test_one_bad_item_does_not_hide_the_good_ones_and_says_why(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().with_prompts(2, 1)
    good = make_rollout()
    other_bytes = make_rollout(rollout_id=good.rollout_id, reward=2.0)
    bad_logprobs = make_rollout(sampler_logprobs=np.array([-1.0, -1.0], dtype=np.float32))
    items = [
        (encode_rollout(good), "new", None),
        (encode_rollout(other_bytes), "refused", "conflict"),
        (b"not msgpack", "refused", "malformed"),
        (pack({"schema": 0}), "refused", "schema-version"),
        (encode_rollout(bad_logprobs), "refused", "malformed"),
        (encode_rollout(make_rollout(run="another")), "refused", "wrong-run"),
        (encode_rollout(make_rollout("nobody-knows")), "refused", "unknown-prompt"),
        (encode_rollout(make_rollout("heldout-0")), "refused", "heldout-prompt"),
        (encode_rollout(make_rollout(version=PolicyVersion(7, 1))), "refused", "unknown-lineage"),
        (encode_rollout(make_rollout("train-1", reward=None)), "new", None),
    ]
    reply = client.push([payload for payload, _, _ in items])
    for given, (_, outcome, code) in zip(reply.outcomes, items, strict=True):
        assert (given.outcome, (given.reason or "").split(":")[0]) == (outcome, code or "")
    stats = client.stats()
    assert stats.refused == dict(Counter(code for _, _, code in items if code))
    assert (stats.num_scored, stats.num_pending, stats.num_rollouts) == (1, 1, 2)
    assert stats.tokens is not None
    assert stats.tokens.generated == 2 * 3
    metrics = urllib.request.urlopen(client.base_url + "/metrics").read().decode()
    assert 'tba_rollouts_total{outcome="refused"} 8.0' in metrics
    assert 'tba_buffer_refused_total{reason="malformed"} 2.0' in metrics


def test_a_rollout_that_no_searcher_of_the_recipe_makes_is_too_long(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(searcher={"max_prompt_tokens": 4, "max_response_tokens": 6}).with_prompts(1)
    rollouts = [*(make_rollout(num_tokens=num) for num in (6, 7, 20_000)), make_rollout(prompt_tokens=np.arange(5))]
    reply = client.push([encode_rollout(rollout) for rollout in rollouts])
    assert outcomes(reply) == ["new", "refused", "refused", "refused"]
    assert all((item.reason or "").startswith("too-long: ") for item in reply.outcomes[1:])
    assert client.stats().refused == {"too-long": 3}


def test_the_oldest_rollouts_are_evicted_beyond_the_bound(serve_buffer: ServeBuffer) -> None:
    sections = {"buffer": {"max_rollouts": 20}}
    client, lineage = serve_buffer(**sections).begin(10)
    for i in range(10):
        assert outcomes(client.push(make_payloads([f"train-{i}"], per_prompt=7))) == ["new"] * 7
    stats = client.stats()
    assert (stats.num_rollouts, stats.num_scored, stats.evicted) == (20, 20, {"max_rollouts": 50})
    assert stats.payload_bytes < 70 * len(make_payloads(["train-0"], per_prompt=1)[0]) / 3
    assert stats.num_prompts_seen == 3
    drawn = draw(client, lineage, wait_s=2)
    assert {group.prompt_id for group in drawn.groups} <= {"train-7", "train-8", "train-9"}
    again = serve_buffer(**sections).client()
    assert again.stats().num_prompts_seen == 3
    assert again.stats().mean_reward_recent == stats.mean_reward_recent


def test_nothing_is_acknowledged_while_redis_cannot_write(serve_buffer: ServeBuffer, raw: Redis) -> None:
    client = serve_buffer().with_prompts(2)
    client.push(make_payloads(["train-0"]))
    try:
        raw.config_set("maxmemory", "100kb")
        with pytest.raises(UnavailableError, match="OOM"):
            client.push(make_payloads(["train-1"]))
    finally:
        raw.config_set("maxmemory", 0)
    assert client.stats().num_rollouts == 4
    assert wait_for_push(client, accepted=True) is None  # the upkeep looks once a second
    assert outcomes(client.push(make_payloads(["train-1"]))) == ["new"] * 4


def test_pushes_are_refused_while_redis_does_not_promise_durability(serve_buffer: ServeBuffer, raw: Redis) -> None:
    client = serve_buffer().with_prompts(1)
    try:
        raw.config_set("appendfsync", "everysec")
        assert "appendfsync everysec" in (wait_for_push(client, accepted=False) or "")
    finally:
        raw.config_set("appendfsync", "always")
    assert wait_for_push(client, accepted=True) is None


def wait_for_push(client: BufferClient, *, accepted: bool) -> str | None:
    """Push until a push is accepted, or until one is refused; answers why it was refused."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        try:
            client.push(make_payloads(["train-0"], per_prompt=1))
            if accepted:
                return None
        except UnavailableError as error:
            if not accepted:
                return str(error)
        threading.Event().wait(0.05)
    raise AssertionError(f"no push was {'accepted' if accepted else 'refused'} within {DEADLINE_S:g} s")


def test_unscored_rollouts_never_enter_a_batch(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(4)
    pending = [encode_rollout(make_rollout(f"train-{i % 4}", reward=None)) for i in range(16)]
    failed = [
        encode_rollout(make_rollout("train-0", reward=None, reward_status="failed", reward_reason=reason))
        for reason in ("timeout", "bad_data: no gold", "bad_data: no gold", "bad_data: empty")
    ]
    client.push(pending + failed)
    assert wait_of(client, lineage) == "rollouts"
    client.push(make_payloads(["train-3"], per_prompt=8))
    batch = draw(client, lineage)
    assert {rollout.reward_status for rollout in batch.rollouts} == {"scored"}
    assert batch.scores_failed == {"bad_data": 3, "timeout": 1}
    assert draw(client, lineage).scores_failed == batch.scores_failed  # the open batch once more
    stats = client.stats()
    assert (stats.num_scored, stats.num_pending, stats.num_failed, stats.rollouts_generated) == (8, 16, 4, 28)
    reasons = [(item.reason, item.num, item.example) for item in stats.failed_reasons]
    assert reasons == [("bad_data", 3, "bad_data: no gold"), ("timeout", 1, "timeout")]
