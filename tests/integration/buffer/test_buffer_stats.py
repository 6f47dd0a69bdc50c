"""GET /v1/stats and GET /metrics: they add up, agree with each other, and survive a restart of the buffer."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tba_reward.metrics import Metrics as RewardMetrics

from tba.api import AckRequest, BatchRequest, LeaseRequest, Stats
from tba.versions import PolicyVersion
from tba.wire import Heartbeat, Wait, encode_rollout
from tests.support.buffer import make_payloads, make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.redis_process import RedisProcess

SECTIONS = {"buffer": {"max_rollouts": 40}}
BATCH_ROLLOUTS = 16
Labels = frozenset[tuple[str, str]]


def metrics_of(buffer: BufferThread) -> dict[tuple[str, Labels], float]:
    """Every sample of /metrics: (name, labels) -> value."""
    text = httpx2.get(f"{buffer.url}/metrics", timeout=60).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: dict[tuple[str, Labels], float], name: str, /, **labels: str) -> float:
    return metrics[name, frozenset(labels.items())]


def lived_in(buffer: BufferThread) -> BufferThread:
    """Pushes of two lengths beyond the cap, refused and pending ones, three consumed batches."""
    client = buffer.client()
    client.upload_prompts(make_prompts(10, 2))
    lineage = start_lineage(client)
    client.push(make_payloads([f"train-{i}" for i in range(5)], num_tokens=3))
    client.push(make_payloads([f"train-{i}" for i in range(5, 10)], num_tokens=100))
    client.push([encode_rollout(make_rollout("train-1", reward=None, num_tokens=20)) for _ in range(6)])
    client.push([b"junk", encode_rollout(make_rollout("train-99"))])
    for step in (1, 2, 3):
        request = BatchRequest(trainer_id="t", lineage=1, step=step, token=lineage.token, wait_s=2)
        batch = client.draw_batch(request)
        request = AckRequest(
            lineage=1,
            step=step,
            token=lineage.token,
            policy_ages=[step - 1] * BATCH_ROLLOUTS,
            num_tokens=sum(len(rollout.response_tokens) for rollout in batch.rollouts),
        )
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
    assert stats.stored.log_position == stats.log_position
    assert stats.refused == {"malformed": 1, "unknown-prompt": 1}
    tokens = stats.tokens
    assert tokens is not None
    assert tokens.generated == 20 * 3 + 20 * 100 + 6 * 20
    assert 48 * 3 <= tokens.trained <= 48 * 100
    assert (stats.rollouts_drawn, stats.rollouts_trained, stats.slots["total"]) == (48, 48, 12)
    assert stats.unique_ratio == stats.slots["distinct_rollouts"] / 48
    assert stats.realised_most_on_policy == stats.slots["recent"] / 12
    assert stats.policy_age_histogram == {0: 16, 1: 16, 2: 16}
    assert (stats.num_prompts_seen, stats.num_prompts_drawable) == (9, 9)
    assert (stats.epoch, stats.leases["open"]) == (1, 3)
    assert stats.index_bytes > 0


def test_versions_and_ages_follow_the_rollouts_and_the_trainer(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(2))
    lineage = start_lineage(client)
    for step in (0, 5, 5, 9):
        client.push([encode_rollout(make_rollout(version=PolicyVersion(lineage.lineage, step)))])
    stored = client.stats().stored
    assert stored is not None
    assert stored.by_version == {"1-9": 1, "1-5": 2, "1-0": 1}


def test_a_restart_changes_no_count(serve_buffer: ServeBuffer) -> None:
    first = lived_in(serve_buffer(**SECTIONS))
    before, metrics_before = first.client().stats(), metrics_of(first)
    again = serve_buffer(**SECTIONS)
    after, metrics_after = again.client().stats(), metrics_of(again)
    own = {"epoch": 0, "index_bytes": 0, "rates": None}
    assert after.model_copy(update=own) == before.model_copy(update=own)
    assert after.epoch == before.epoch + 1

    def of_the_run(metrics: dict[tuple[str, Labels], float]) -> dict[tuple[str, Labels], float]:
        own = ["tba_request", "tba_buffer_index", "tba_waits", "tba_component_"]  # of the process, or of the moment
        own += ["tba_unauthorized"]
        return {key: number for key, number in metrics.items() if not key[0].startswith(tuple(own))}

    assert of_the_run(metrics_after) == of_the_run(metrics_before)


def test_metrics_say_what_stats_say(serve_buffer: ServeBuffer) -> None:
    buffer = lived_in(serve_buffer(**SECTIONS))
    stats, metrics = buffer.client().stats(), metrics_of(buffer)
    for status, number in (("scored", stats.num_scored), ("pending", stats.num_pending), ("failed", stats.num_failed)):
        assert value(metrics, "tba_buffer_rollouts", status=status) == number
    for outcome, number in stats.pushed.items():
        assert value(metrics, "tba_rollouts_total", outcome=outcome) == number
    for code, number in stats.refused.items():
        assert value(metrics, "tba_buffer_refused_total", reason=code) == number
    for reason, number in stats.evicted.items():
        assert value(metrics, "tba_buffer_evicted_total", reason=reason) == number
    assert value(metrics, "tba_buffer_payload_bytes") == stats.payload_bytes
    assert value(metrics, "tba_buffer_log_events_since_checkpoint") == stats.log_position - stats.checkpoint_position
    assert value(metrics, "tba_trained_rollouts_total") == stats.rollouts_trained
    assert stats.tokens is not None
    assert value(metrics, "tba_generated_tokens_total") == stats.tokens.generated
    assert value(metrics, "tba_trained_tokens_total") == stats.tokens.trained
    assert value(metrics, "tba_buffer_batches_total", event="acked") == 3
    assert value(metrics, "tba_buffer_slots_total", kind="replay") == stats.slots["replay"]
    assert value(metrics, "tba_buffer_open_leases") == stats.leases["open"]
    assert value(metrics, "tba_policy_age_steps_bucket", le="1.0") == 32
    assert value(metrics, "tba_policy_age_steps_count") == 48
    assert value(metrics, "tba_policy_age_steps_sum") == 48
    assert value(metrics, "tba_redis_durable") == 1
    assert value(metrics, "tba_requests_total", operation="push", status="200") == 4
    assert value(metrics, "tba_request_seconds_count", operation="draw_batch") == 3
    assert value(metrics, "tba_requests_in_flight", operation="lease") == 0


@pytest.mark.parametrize(("every_s", "described"), [(1e9, 8), (0.0, 12)])
def test_the_detail_of_a_large_buffer_is_kept_until_it_is_due(
    serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch, every_s: float, described: int
) -> None:
    monkeypatch.setattr("tba_buffer.monitoring.stats.ALWAYS_FRESH_ROLLOUTS", 4)
    monkeypatch.setattr("tba_buffer.monitoring.stats.DETAIL_EVERY_S", every_s)
    monkeypatch.setattr("tba_buffer.monitoring.stats.DETAIL_SHARE", 1e9)
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(1))
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
    assert value(after, "tba_trained_rollouts_total") == value(before, "tba_trained_rollouts_total") == 48
    assert (value(before, "tba_redis_durable"), value(after, "tba_redis_durable")) == (1, 0)


def test_rates_are_known_after_a_while(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(2))
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


def test_who_waits_and_who_is_alive_is_counted(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    client = buffer.client()
    for number in range(3):
        wait = Wait(name="no-version", for_s=1.0, deadline_in_s=9.0) if number else None
        name = f"searcher-{number}"
        client.heartbeat(
            Heartbeat(component_id=name, kind="searcher", run="test", state="waiting", version=None, wait=wait)
        )
    metrics = metrics_of(buffer)
    assert value(metrics, "tba_waits", name="no-version") == 2
    assert value(metrics, "tba_components_alive", kind="searcher") == 3
