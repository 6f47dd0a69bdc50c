"""The figures of benchmarks/buffer.py, one function each: it sets its stage, measures, and answers numbers."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.buffer_bench import clients
from benchmarks.buffer_bench.crowd import Tally, gather, percentile, rate
from benchmarks.buffer_bench.world import cpu_s, fill, rss_bytes, world
from tests.support.buffer import Stack, start_lineage

NUM_CLIENTS = 8
NUM_PROMPTS = 2000
Figure = dict[str, float]


def _crowd(prepare: Any, num: int, duration_s: float, **kwargs: Any) -> list[Tally]:
    crowd = gather(prepare, num, duration_s=duration_s, **kwargs)
    crowd.go()
    return crowd.collect(duration_s + 120)


def pushes(num_bytes: int, duration_s: float) -> Figure:
    """Durable pushes over HTTP, beside the same Lua call straight to Redis, in turns in one run."""
    with world(num_prompts=NUM_PROMPTS) as stack:
        size = {"num_bytes": num_bytes, "num_prompts": NUM_PROMPTS}
        before = cpu_s(stack.buffer.process.pid), cpu_s(stack.redis.process.pid)
        http = _crowd(clients.http_pusher, NUM_CLIENTS, duration_s, url=stack.buffer.url, **size)
        after = cpu_s(stack.buffer.process.pid), cpu_s(stack.redis.process.pid)
        run = stack.recipe.run.name
        direct = _crowd(clients.redis_pusher, NUM_CLIENTS, duration_s, redis_url=stack.redis.url, run=run, **size)
        stats = stack.client.stats()
        num_http, num_direct = sum(t.num_items for t in http), sum(t.num_items for t in direct)
        assert stats.pushed["new"] >= num_http
        return {
            "http_per_s": rate(http),
            "direct_per_s": rate(direct),
            "ratio": rate(http) / rate(direct),
            "http_p50_ms": 1000 * percentile(http, 0.5),
            "http_p99_ms": 1000 * percentile(http, 0.99),
            "buffer_cpu_us_per_rollout": 1e6 * (after[0] - before[0]) / num_http,
            "redis_cpu_us_per_rollout": 1e6 * (after[1] - before[1]) / num_http,
            "client_cpu_us_per_rollout": 1e6 * sum(t.cpu_s for t in http) / num_http,
            "direct_client_cpu_us_per_rollout": 1e6 * sum(t.cpu_s for t in direct) / num_direct,
        }


def fresh_batches(duration_s: float) -> Figure:
    """Fresh exact batches of 64, 8 clients: as batches (durable record, flow control), and the payloads
    alone straight from Redis."""
    with world(num_prompts=NUM_PROMPTS, batch_deadline_s=2.0) as stack:
        fill(stack, 100_000, num_bytes=4096, num_prompts=NUM_PROMPTS)
        lineage, url = start_lineage(stack.client), stack.buffer.url
        stack.client.stats()
        token = {"lineage": lineage.lineage, "token": lineage.token}
        before = cpu_s(stack.buffer.process.pid)
        batches = _crowd(clients.http_drawer, NUM_CLIENTS, duration_s, url=url, num_clients=NUM_CLIENTS, **token)
        buffer_cpu_s = cpu_s(stack.buffer.process.pid) - before
        run = stack.recipe.run.name
        direct = _crowd(
            clients.redis_reader, NUM_CLIENTS, duration_s, redis_url=stack.redis.url, run=run, num_rollouts=64
        )
        return {
            "batches_rollouts_per_s": rate(batches),
            "direct_per_s": rate(direct),
            "ratio_batches": rate(batches) / rate(direct),
            "batches_p50_ms": 1000 * percentile(batches, 0.5),
            "batches_p99_ms": 1000 * percentile(batches, 0.99),
            "buffer_cpu_us_per_batch": 1e6 * buffer_cpu_s / sum(t.num_calls for t in batches),
        }


def batches_while_pushing(duration_s: float, max_push_per_s: float) -> Figure:
    """Batches of 160 (8 groups of 20) while 4 clients push at half of the maximum: first 4 clients that draw, then
    one trainer that draws and acks step after step."""
    with world(
        num_prompts=NUM_PROMPTS, sampling={"group_size": 20, "rollouts_per_visit": 20}, batch_deadline_s=2.0
    ) as stack:
        fill(stack, 100_000, num_bytes=4096, num_prompts=NUM_PROMPTS)
        url = stack.buffer.url
        num_pushers = 4
        period_s = num_pushers * 64 / (max_push_per_s / 2)
        push = {"url": url, "num_bytes": 4096, "num_prompts": NUM_PROMPTS, "period_s": period_s}

        def beside_pushers(prepare: Any, num: int, **kwargs: Any) -> tuple[list[Tally], list[Tally]]:
            pushers = gather(clients.http_pusher, num_pushers, duration_s=duration_s, **push)
            lineage = start_lineage(stack.client)  # batches that are open for an older one are void
            token = {"url": url, "lineage": lineage.lineage, "token": lineage.token, "num_rollouts": 160}
            others = gather(prepare, num, duration_s=duration_s, **token, **kwargs)
            pushers.go()
            others.go()
            return others.collect(duration_s + 120), pushers.collect(duration_s + 120)

        drawn, pushed = beside_pushers(clients.http_drawer, 4, num_clients=4)
        trained, _ = beside_pushers(clients.trainer, 1)
        return {
            "batches_per_s": rate(drawn) / 160,
            "draw_p50_ms": 1000 * percentile(drawn, 0.5),
            "draw_p99_ms": 1000 * percentile(drawn, 0.99),
            "one_trainer_batches_per_s": rate(trained) / 160,
            "one_trainer_draw_and_ack_p99_ms": 1000 * percentile(trained, 0.99),
            "pushed_per_s": rate(pushed),
            "push_p99_ms": 1000 * percentile(pushed, 0.99),
        }


def restart_and_growth(num_rollouts: int, duration_s: float) -> Figure:
    """Push and draw with 10^4 stored and with `num_rollouts` stored; then the buffer process is killed and started."""
    num_prompts = num_rollouts // 16
    with world(num_prompts=num_prompts, batch_deadline_s=2.0) as stack:
        fill(stack, 10_000, num_bytes=700, num_prompts=num_prompts)
        small = _costs(stack, duration_s, num_prompts)
        fill(stack, num_rollouts - stack.client.stats().num_rollouts, num_bytes=700, num_prompts=num_prompts)
        large = _costs(stack, duration_s, num_prompts)
        stats = stack.client.stats()
        from_tail_s = _restart_s(stack)
        until_based_s = _wait_for_base(stack)
        from_base_s = _restart_s(stack)
        assert stack.client.stats().num_rollouts == stats.num_rollouts
        return {
            "num_rollouts": stats.num_rollouts,
            "restart_s": from_tail_s,
            "restart_from_base_s": from_base_s,
            "base_written_after_s": until_based_s,
            "resident_bytes": rss_bytes(stack.buffer.process.pid),
            **{f"small_{name}": value for name, value in small.items()},
            **{f"large_{name}": value for name, value in large.items()},
            "push_growth": large["push_cpu_us"] / small["push_cpu_us"],
            "draw_growth": large["draw_cpu_us"] / small["draw_cpu_us"],
        }


def _costs(stack: Stack, duration_s: float, num_prompts: int) -> Figure:
    """CPU of buffer and Redis per rollout, pushing with 2 clients and drawing with 2."""
    lineage, url = start_lineage(stack.client), stack.buffer.url
    stack.client.stats()

    def used_s() -> float:
        return cpu_s(stack.buffer.process.pid) + cpu_s(stack.redis.process.pid)

    token = {"lineage": lineage.lineage, "token": lineage.token}
    before = used_s()
    drawn = _crowd(clients.http_drawer, 2, duration_s, url=url, num_clients=2, **token)
    between = used_s()
    pushed = _crowd(clients.http_pusher, 2, duration_s, url=url, num_bytes=700, num_prompts=num_prompts)
    after = used_s()
    return {
        "push_cpu_us": 1e6 * (after - between) / sum(t.num_items for t in pushed),
        "draw_cpu_us": 1e6 * (between - before) / sum(t.num_items for t in drawn),
        "push_per_s": rate(pushed),
        "draw_per_s": rate(drawn),
    }


def _restart_s(stack: Stack) -> float:
    stack.buffer.kill()
    began_s = time.perf_counter()
    stack.buffer.start()
    return time.perf_counter() - began_s


def _wait_for_base(stack: Stack) -> float:
    """Wait until the background has put everything into a base; return the seconds."""
    began_s, client = time.perf_counter(), stack.client
    while (stats := client.stats()).log_position - stats.checkpoint_position > 250_000:
        if time.perf_counter() - began_s > 120:
            raise RuntimeError("the log was not compacted within 120 s")
        time.sleep(0.2)
    return time.perf_counter() - began_s
