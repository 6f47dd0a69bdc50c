"""Clients of Redis beside the buffer's shared connections: CPU of the client, and calls per second.

    pip install --group bench-redis
    python benchmarks/bench_redis_clients.py [--json FILE]

redis-py, our shared connections, coredis and valkey-glide run the same commands against one Redis on loopback,
in turns, NUM_ROUNDS times, NUM_TASKS calls at once. Redis writes no file: what the clients cost is measured. Printed:
medians, and in brackets the ratio to redis-py. The Rust threads of glide count, since they run in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import coredis  # pyright: ignore[reportMissingImports]
import glide  # pyright: ignore[reportMissingImports]
import uvloop
from redis.asyncio import BlockingConnectionPool, Redis

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services/buffer")]

from tba_buffer.storage.redis_client import MultiplexedPool  # noqa: E402

from tests.support.redis_process import start_redis  # noqa: E402

NUM_ROUNDS = 5
NUM_TASKS = 16
NUM_CALLS, NUM_WARM_UP_CALLS = 2000, 200
NUM_CONNECTIONS = 4
TIMEOUT_S = 15.0
SCRIPT = "return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)"
ARGUMENTS = ["counter", *(f"argument-{number}" for number in range(29))]
FIELDS = [str(number) for number in range(64)]
PAYLOAD = b"x" * 4096
BASE = "redis-py pool"
Call = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def clients(port: int) -> AsyncIterator[dict[str, dict[str, Call]]]:
    """Connect every client; yield name -> command -> one call."""
    pool = BlockingConnectionPool(host="127.0.0.1", port=port, max_connections=64, socket_timeout=TIMEOUT_S)
    plain = Redis.from_pool(pool)
    sha = await plain.script_load(SCRIPT)
    await plain.hset("payloads", mapping=dict.fromkeys(FIELDS, PAYLOAD))
    shared = MultiplexedPool(plain, NUM_CONNECTIONS)
    address = glide.NodeAddress("127.0.0.1", port)
    rust = await glide.GlideClient.create(
        glide.GlideClientConfiguration([address], request_timeout=int(1000 * TIMEOUT_S))
    )
    async with coredis.Redis(host="127.0.0.1", port=port) as core:
        yield {
            BASE: {
                "script": lambda: plain.evalsha(sha, 1, "hash", *ARGUMENTS),
                "ping": lambda: plain.ping(),
                "64 payloads of 4 KB": lambda: plain.hmget("payloads", FIELDS),
            },
            f"{NUM_CONNECTIONS} shared connections": {
                "script": lambda: shared.run(["EVALSHA", sha, 1, "hash", *ARGUMENTS]),
                "ping": lambda: shared.run(["PING"]),
                "64 payloads of 4 KB": lambda: shared.run(["HMGET", "payloads", *FIELDS]),
            },
            "coredis": {
                "script": lambda: core.evalsha(sha, keys=["hash"], args=ARGUMENTS),
                "ping": lambda: core.ping(),
                "64 payloads of 4 KB": lambda: core.hmget("payloads", FIELDS),
            },
            "valkey-glide": {
                "script": lambda: rust.custom_command(["EVALSHA", sha, "1", "hash", *ARGUMENTS]),
                "ping": lambda: rust.ping(),
                "64 payloads of 4 KB": lambda: rust.hmget("payloads", [*FIELDS]),
            },
        }
    await rust.close()
    await shared.aclose()
    await plain.aclose()


async def measure(call: Call, num_calls: int) -> dict[str, float]:
    """Make the calls, NUM_TASKS at once; return microseconds of CPU per call, and calls per second."""
    left = iter(range(num_calls))

    async def work() -> None:
        for _ in left:
            await call()

    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(NUM_TASKS)))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return {"cpu_us": 1e6 * cpu_s / num_calls, "calls_per_s": num_calls / wall_s}


async def run(port: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return command -> client -> medians of the rounds."""
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    async with clients(port) as made:
        for _ in range(NUM_ROUNDS):
            for client, calls in made.items():
                for command, call in calls.items():
                    await measure(call, NUM_WARM_UP_CALLS)
                    found = await measure(call, NUM_CALLS)
                    rounds.setdefault(command, {}).setdefault(client, []).append(found)
    return {
        command: {
            client: {unit: statistics.median(row[unit] for row in rows) for unit in rows[0]}
            for client, rows in by_client.items()
        }
        for command, by_client in rounds.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_redis(Path(folder), options=("--save", ""))
        try:
            results = uvloop.run(run(server.port))
        finally:
            server.kill()
    print("| command | client | CPU, us | calls per second |\n|---|---|---|---|")
    for command, rows in results.items():
        for client, row in rows.items():
            cells = [f"{row[unit]:.0f} ({row[unit] / rows[BASE][unit]:.2f})" for unit in ("cpu_us", "calls_per_s")]
            print(f"| {command} | {client} | {' | '.join(cells)} |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
