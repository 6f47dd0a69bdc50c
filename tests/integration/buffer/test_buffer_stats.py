"""GET /v1/stats and GET /metrics: they add up, agree with each other, and survive a restart of the buffer."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tba_reward.metrics import Metrics as RewardMetrics

from tba.api import AckRequest, LeaseRequest, Stats
from tba.wire import encode_rollout
from tests.support.buffer import make_payloads, make_rollout
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.leases import draw
from tests.support.metrics import metrics_of as families_of
from tests.support.redis_process import RedisProcess

SECTIONS = {"buffer": {"max_rollouts": 40}}


def metrics_of(buffer: BufferThread) -> dict[tuple[str, ...], float]:
    """Every sample of /metrics: (name, values of its labels) -> value."""
    samples = (sample for family in families_of(buffer.url) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def lived_in(buffer: BufferThread) -> BufferThread:
    """Pushes of two lengths beyond the cap, refused and pending ones, three consumed batches."""
    client, lineage = buffer.begin(10, 2)
    client.push(make_payloads([f"train-{i}" for i in range(5)], num_tokens=3))
    client.push(make_payloads([f"train-{i}" for i in range(5, 10)], num_tokens=100))
    client.push([encode_rollout(make_rollout("train-1", reward=None, num_tokens=20)) for _ in range(6)])
    client.push([b"junk", encode_rollout(make_rollout("train-99"))])
    for step in (1, 2, 3):
        batch = draw(client, lineage, step, wait_s=2)
        num_tokens, ages = sum(len(rollout.response_tokens) for rollout in batch.rollouts), [step - 1] * 16
        request = AckRequest(lineage=1, step=step, token=lineage.token, policy_ages=ages, num_tokens=num_tokens)
        client.ack(batch.batch_id, request)
    client.lease(LeaseRequest(searcher_id="s", max_leases=3))
    return buffer


def test_the_counts_add_up(serve_buffer: ServeBuffer) -> None:
    stats = lived_in(serve_buffer(**SECTIONS)).client().stats()
    assert (stats.num_rollouts, stats.num_scored, stats.num_pending, stats.num_failed) == (40, 34, 6, 0)
    assert stats.rollouts_generated == stats.num_rollouts + sum(stats.evicted.values())
    assert stats.evicted == {"max_rollouts": 6}
    assert stats.stored is not None
    assert stats.stored.by_version == {"0-0": 40}
    assert stats.stored.reward_deciles is not None
    assert (stats.stored.reward_deciles[0], stats.stored.reward_deciles[-1]) == (0.0, 3.0)
    assert (stats.stored.log_position, stats.refused) == (stats.log_position, {"malformed": 1, "unknown-prompt": 1})
    tokens = stats.tokens
    assert tokens is not None
    assert tokens.generated == 20 * 3 + 20 * 100 + 6 * 20
    assert 48 * 3 <= tokens.trained <= 48 * 100
    assert (stats.rollouts_drawn, stats.rollouts_trained, stats.slots["total"]) == (48, 48, 12)
    assert stats.unique_ratio == stats.slots["distinct_rollouts"] / 48
    assert stats.realised_most_on_policy == stats.slots["recent"] / 12
    assert stats.policy_age_histogram == {0: 16, 1: 16, 2: 16}
    assert (stats.num_prompts_seen, stats.num_prompts_drawable, stats.epoch, stats.leases["open"]) == (9, 9, 1, 3)
    assert stats.index_bytes > 0


def test_a_restart_changes_no_count(serve_buffer: ServeBuffer) -> None:
    first = lived_in(serve_buffer(**SECTIONS))
    before, metrics_before = first.client().stats(), metrics_of(first)
    again = serve_buffer(**SECTIONS)
    after, metrics_after = again.client().stats(), metrics_of(again)
    own = {"epoch": 0, "index_bytes": 0, "rates": None}
    assert after.model_copy(update=own) == before.model_copy(update=own)
    assert after.epoch == before.epoch + 1

    def of_the_run(metrics: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
        own = ["tba_request", "tba_buffer_index", "tba_waits", "tba_component_"]  # of the process, or of the moment
        own += ["tba_unauthorized"]
        return {key: number for key, number in metrics.items() if not key[0].startswith(tuple(own))}

    assert of_the_run(metrics_after) == of_the_run(metrics_before)


def test_metrics_say_what_stats_say(serve_buffer: ServeBuffer) -> None:
    buffer = lived_in(serve_buffer(**SECTIONS))
    stats, metrics = buffer.client().stats(), metrics_of(buffer)
    assert stats.tokens is not None
    expected: dict[tuple[str, ...], float] = {
        ("tba_buffer_rollouts", "scored"): stats.num_scored,
        ("tba_buffer_rollouts", "pending"): stats.num_pending,
        ("tba_buffer_rollouts", "failed"): stats.num_failed,
        **{("tba_rollouts_total", outcome): number for outcome, number in stats.pushed.items()},
        **{("tba_buffer_refused_total", code): number for code, number in stats.refused.items()},
        **{("tba_buffer_evicted_total", reason): number for reason, number in stats.evicted.items()},
        ("tba_buffer_payload_bytes",): stats.payload_bytes,
        ("tba_buffer_log_events_since_checkpoint",): stats.log_position - stats.checkpoint_position,
        ("tba_trained_rollouts_total",): stats.rollouts_trained,
        ("tba_generated_tokens_total",): stats.tokens.generated,
        ("tba_trained_tokens_total",): stats.tokens.trained,
        ("tba_buffer_batches_total", "acked"): 3,
        ("tba_buffer_slots_total", "replay"): stats.slots["replay"],
        ("tba_buffer_open_leases",): stats.leases["open"],
        ("tba_policy_age_steps_bucket", "1.0"): 32,
        ("tba_policy_age_steps_count",): 48,
        ("tba_policy_age_steps_sum",): 48,
        ("tba_redis_durable",): 1,
        ("tba_requests_total", "push", "200"): 4,
        ("tba_request_seconds_count", "draw_batch"): 3,
        ("tba_requests_in_flight", "lease"): 0,
    }
    assert {key: metrics[key] for key in expected} == expected


@pytest.mark.parametrize(("every_s", "described"), [(1e9, 8), (0.0, 12)])
def test_the_detail_of_a_large_buffer_is_kept_until_it_is_due(
    serve_buffer: ServeBuffer, every_s: float, described: int
) -> None:
    constants = {"ALWAYS_FRESH_ROLLOUTS": 4, "DETAIL_EVERY_S": every_s, "DETAIL_SHARE": 1e9}
    client = serve_buffer(buffer=constants).with_prompts(1)
    client.push(make_payloads(["train-0"], per_prompt=8))
    assert client.stats().stored is not None
    client.push(make_payloads(["train-0"], per_prompt=4))
    stats = client.stats()
    assert stats.stored is not None
    assert (stats.num_rollouts, sum(stats.stored.by_version.values())) == (12, described)


def test_metrics_are_served_while_redis_is_away(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    buffer = lived_in(serve_buffer(**SECTIONS))
    before = metrics_of(buffer)
    redis.stop()
    try:
        after = metrics_of(buffer)
    finally:
        redis.start()
    assert after["tba_trained_rollouts_total",] == before["tba_trained_rollouts_total",] == 48
    assert (before["tba_redis_durable",], after["tba_redis_durable",]) == (1, 0)


def test_rates_are_known_after_a_while(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().with_prompts(2)
    stats: Stats = client.stats()
    for _ in range(400):
        client.push(make_payloads(["train-0"]))
        stats = client.stats()
        if stats.rates is not None:
            break
    assert stats.rates is not None
    assert stats.rollouts_generated is not None
    assert 0 < stats.rates.generated_per_s <= stats.rollouts_generated / stats.rates.window_s
    assert stats.rates.trained_per_s == 0
    assert stats.rates.generated_tokens_per_s == pytest.approx(3 * stats.rates.generated_per_s)


def test_the_operations_page_lists_every_metric_and_no_other(serve_buffer: ServeBuffer) -> None:
    text = httpx2.get(f"{lived_in(serve_buffer(**SECTIONS)).url}/metrics", timeout=60).text
    in_code = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    in_code = {name for name in in_code if not name.endswith("_created")}
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    table = page.partition("| metric | labels | meaning |\n")[2].partition("\n\n")[0]
    in_docs = {name for line in table.splitlines() for name in re.findall(r"`(tba_\w+)`", line.split("|")[1])}
    of_reward = {name for name in in_docs if name.startswith("tba_reward_")}
    assert in_docs - of_reward == in_code
    registry = CollectorRegistry()
    RewardMetrics(registry)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    counted = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert of_reward == {name for name in counted if not name.endswith("_created")}
