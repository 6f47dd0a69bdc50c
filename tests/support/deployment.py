"""A deployment as real processes on this machine: an S3 server, Redis, buffer and reward service, tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tba.config import Recipe, parse_recipe
from tests.support.buffer import make_recipe, start_buffer, write_recipe
from tests.support.model_folder import make_model_folder
from tests.support.redis_process import free_port, start_redis
from tests.support.reward_process import reward_of
from tests.support.s3_server import CREDENTIALS, S3Server

TOKENS = {role: f"{role}-token-{'x' * 16}" for role in ("searcher", "trainer", "operator", "viewer")}
REDIS_OPTIONS = (
    *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
    *("--auto-aof-rewrite-min-size", "1gb", "--rdbcompression", "no"),
)


@dataclass
class Described:
    """Services whose recipe is a document."""

    folder: Path
    document: dict[str, Any]

    def recipe(self, **sections: dict[str, Any]) -> Recipe:
        document = dict(self.document)
        for name, values in sections.items():
            document[name] = {**document.get(name, {}), **values}
        return parse_recipe(document, where="test recipe")

    def write(self, name: str, **sections: dict[str, Any]) -> Path:
        return write_recipe(self.folder / f"{name}.json", self.recipe(**sections))


@dataclass
class Deployment(Described):
    """A running deployment, with nothing set up in it yet."""

    store_server: S3Server


@contextmanager
def deployed(folder: Path) -> Iterator[Deployment]:
    """Start all services for the block and yield them; the bucket `tba` does not exist yet."""
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    store = S3Server(folder / "s3")
    redis = start_redis(folder / "redis", options=REDIS_OPTIONS)
    processes: list[Any] = [redis]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        try:
            store.start()
            buffer_port, reward_port = free_port(), free_port()
            recipe = make_recipe(
                model={"path": str(make_model_folder(folder / "models" / "tiny"))},
                data={"num_train": 40, "num_heldout": 10},
                buffer={
                    "port": buffer_port,
                    "url": f"http://127.0.0.1:{buffer_port}",
                    "redis_url": redis.url,
                    "max_bytes": 64 * 2**20,
                },
                reward={"port": reward_port, "url": f"http://127.0.0.1:{reward_port}", "num_workers": 1},
                store={"url": "s3://tba/deep", "endpoint_url": store.url},
                auth={"tokens_file": str(tokens)},
            )
            path = write_recipe(folder / "services.json", recipe)
            processes.append(start_buffer(path))
            with reward_of(path, f"http://127.0.0.1:{reward_port}"):
                yield Deployment(folder, recipe.model_dump(mode="json"), store)
        finally:
            for process in reversed(processes):
                process.stop()
            store.kill()
