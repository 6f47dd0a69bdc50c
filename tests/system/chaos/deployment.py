"""The run that is put to the test: real processes on this machine, and a proxy between each pair that talks.

    trainer ----link---+                                       +---link---> redis
    searcher-0 --link--+--> relay (observer) --> buffer -------+---link---> reward   (the background scorer)
    searcher-1 --link--+
    searcher-i --link--> reward
    trainer, searcher-i --link--> relay (store faults) --> the bundled S3 server

The harness itself asks the buffer and Redis directly, so that a fault of a link does not blind it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.clients import BufferClient
from tba.config import Recipe, parse_recipe
from tba_cli.prompts.reader import prompts_of, upload_prompts
from tba_cli.redis_server import START_SCRIPT
from tests.support.buffer import SERVICE_PATHS
from tests.support.redis_process import DURABLE, free_port, redis_server_path
from tests.support.s3_server import CREDENTIALS, PROGRAM, READ_ONLY, store_environ
from tests.system.chaos.links import Link
from tests.system.chaos.loop_thread import LoopThread
from tests.system.chaos.observer import Observer
from tests.system.chaos.relay import Relay
from tests.system.chaos.supervisor import Component, Supervisor

RUN = "chaos"
BUCKET = "chaos"
START_S = 120.0
EPISODE_TURNS = 3
ENDLESS = 1_000_000_000
NEVER_EVICTS = {"max_rollouts": 50_000_000, "max_bytes": 1024**4}


def chaos_sections(model: Path, *, num_searchers: int) -> dict[str, dict[str, Any]]:
    """Small batches of sums and conversations, without an end, with bounds that are never reached."""
    return {
        "run": {"name": RUN},
        "model": {"path": str(model), "dtype": "bfloat16"},  # in which deltas are small enough to pay
        # sums of one turn, sums with a tool, and an environment of EPISODE_TURNS turns
        "data": {"generator": "tests.support.environments:prompts", "num_train": 3000, "num_heldout": 129},
        "environments": {
            "talk": {
                "environment": "tests.support.environments:Parity",
                "settings": {"turns": EPISODE_TURNS},
                "truncated_reward": 0.0,
            },
            "sum": {"tools": ["tests.support.environments:add"], "truncated_reward": 0.0},
        },
        "reward": {"tasks": {"sum": {"scorers": [{"kind": "exact"}]}}},
        "buffer": {"lease_s": 20.0, "batch_deadline_s": 20.0, **NEVER_EVICTS},
        "sampling": {
            "prompts_per_batch": 8,
            "group_size": 4,
            "rollouts_per_visit": 4,
            "most_on_policy_prob": 0.8,
            "min_size_to_sample": 64,
            "samples_per_insert": 1.5,
            "samples_per_insert_error": 256,
        },
        "searcher": {
            "num_searchers": num_searchers,
            "num_slots": 16,
            "max_prompt_tokens": 200,
            "max_response_tokens": 12,
        },
        "objective": {"preset": "tba_prime", "beta": {"value": 0.2}, "anchor": "fixed"},
        "trainer": {"num_steps": ENDLESS, "sync_interval": 8, "checkpoint_interval": 40, "learning_rate": 2e-4},
        "eval": {"every_steps": 400, "num_prompts": 32, "num_prompts_final": 128},
        "store": {"url": f"s3://{BUCKET}/trial"},
    }


@dataclass(frozen=True)
class Ports:
    redis: int
    buffer: int
    reward: int
    store: int


class Deployment:
    """Starts everything; `close` ends everything."""

    def __init__(self, folder: Path, model: Path, *, num_searchers: int = 3) -> None:
        self.folder = folder
        self.ports = Ports(*(free_port() for _ in range(4)))
        self.searchers = tuple(f"searcher-{number}" for number in range(num_searchers))
        self.supervisor, self.observer, self._loop = Supervisor(), Observer(), LoopThread()
        self.store_relay = Relay(self.ports.store)
        self.buffer_relay = Relay(self.ports.buffer, self.observer.see)
        self.links: dict[str, Link] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for relay in (self.store_relay, self.buffer_relay):
            self._loop.call(relay.start())
        for client in ("trainer", *self.searchers):
            self._link(f"{client}-buffer", self.buffer_relay.port)
            self._link(f"{client}-store", self.store_relay.port)
        for client in ("buffer", *self.searchers):
            self._link(f"{client}-reward", self.ports.reward)
        self._link("buffer-redis", self.ports.redis)
        self.recipe = self._recipe(model)
        self.client = BufferClient(f"http://127.0.0.1:{self.ports.buffer}", retry_s=0.0, timeout_s=5.0)

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.ports.redis}/0"

    @property
    def buffer_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.buffer}"

    @property
    def log_folder(self) -> Path:
        return self.folder / "logs"

    def set_link(self, name: str, mode: Any) -> None:
        self._loop.call(self.links[name].set(mode))

    def start(self) -> None:
        """Start in order, each when the one before answers, upload the prompts, and watch over all of them."""
        self.log_folder.mkdir()
        for name in ("redis", "store", "buffer", "reward"):
            self.supervisor.add(self._component(name)).start()
        self._until("redis", lambda: _redis_answers(self.redis_url))
        self._until("store", lambda: bool(_http(f"http://127.0.0.1:{self.ports.store}/")))
        self._make_bucket()
        self._until("buffer", lambda: _http(f"{self.buffer_url}/readyz") == 200)
        self._until("reward", lambda: _http(f"http://127.0.0.1:{self.ports.reward}/readyz") == 200)
        upload_prompts(self.client, prompts_of(self.recipe), max_chunk_bytes=1_000_000)
        for name in ("trainer", *self.searchers):
            self.supervisor.add(self._component(name)).start()
        self.supervisor.start()

    def close(self) -> None:
        self.supervisor.stop()
        self.client.close()
        self._loop.close()

    def environ(self, name: str) -> dict[str, str]:
        """The environment of a component: its own links stand for the services that it uses."""
        mine = {service: self.links.get(f"{name}-{service}") for service in ("buffer", "reward", "store", "redis")}
        urls = {
            "TBA_BUFFER__URL": _url(mine["buffer"]),
            "TBA_REWARD__URL": _url(mine["reward"]),
            "TBA_STORE__ENDPOINT_URL": _url(mine["store"]),
            "TBA_BUFFER__REDIS_URL": "" if mine["redis"] is None else f"redis://127.0.0.1:{mine['redis'].port}/0",
        }
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "TBA_"))}
        return {
            **inherited,
            **(READ_ONLY if name.startswith("searcher") else CREDENTIALS),
            **{key: value for key, value in urls.items() if value},
            "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS)),
            "OMP_NUM_THREADS": "1",
            "TBA_SEARCHER_ID": name,
        }

    def _component(self, name: str) -> Component:
        kind = name.split("-")[0]
        command, environ = [sys.executable, "-m", f"tba_{kind}", "--config", str(self._config_path)], self.environ(name)
        folder = self.folder
        if kind == "redis":
            folder = self.folder / "redis"
            place = ("--bind", "127.0.0.1", "--port", str(self.ports.redis), "--dir", str(folder))
            command = [
                "sh",
                str(START_SCRIPT),
                redis_server_path(),
                *place,
                *DURABLE,
                "--auto-aof-rewrite-min-size",
                "1gb",
            ]
        elif kind == "store":
            folder = self.folder / "store"
            command, environ = [sys.executable, str(PROGRAM)], store_environ(folder, self.ports.store)
        folder.mkdir(exist_ok=True)
        return Component(
            name=name,
            command=command,
            environ=environ,
            folder=folder,
            log_path=self.log_folder / f"{name}.log",
            runs_for_ever=kind not in ("trainer", "searcher"),
        )

    def _recipe(self, model: Path) -> Recipe:
        document = chaos_sections(model, num_searchers=len(self.searchers))
        document["buffer"] |= {"port": self.ports.buffer, "redis_url": self.redis_url}
        document["reward"] |= {"port": self.ports.reward}
        document["store"] |= {"endpoint_url": f"http://127.0.0.1:{self.ports.store}"}
        document["tracking"] = {"metrics_path": str(self.folder / "metrics.jsonl")}
        recipe = parse_recipe(document, where="chaos recipe")
        self._config_path.write_text(json.dumps(document))
        return recipe

    @property
    def _config_path(self) -> Path:
        return self.folder / "recipe.json"

    def _link(self, name: str, target_port: int) -> None:
        self.links[name] = Link(name, target_port)
        self._loop.call(self.links[name].start())

    def _make_bucket(self) -> None:
        from boto3.session import Session
        from botocore.config import Config

        client = Session(
            CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"], region_name="us-east-1"
        ).client(
            "s3", endpoint_url=f"http://127.0.0.1:{self.ports.store}", config=Config(s3={"addressing_style": "path"})
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()

    def _until(self, name: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        component = self.supervisor.components[name]
        while not condition():
            assert component.is_running, f"{name} ended at its start: {component.last_words()}"
            assert time.monotonic() < deadline_s, f"{name} did not answer within {START_S:.0f} s"
            time.sleep(0.05)


def _url(link: Link | None) -> str:
    return "" if link is None else f"http://127.0.0.1:{link.port}"


def _http(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=3) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _redis_answers(url: str) -> bool:
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_timeout=2) as redis:
            return bool(redis.ping())
    except RedisError:
        return False
