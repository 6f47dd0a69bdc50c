"""A whole run whose every link is TLS: Redis, an S3 server, buffer and reward as real processes, and two impostors.

The Redis of the tests' wheel and the S3 server speak no TLS themselves: a proxy in front of each does.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tba.config import Recipe, parse_recipe
from tba_cli.local.services import wait_until_ready
from tba_cli.main import main
from tests.support.buffer import SERVICE_PATHS, write_recipe
from tests.support.e2e import ENDLESS, tiny_sections
from tests.support.redis_process import free_port, start_redis
from tests.support.s3_server import CREDENTIALS, S3Server
from tests.support.served_app import TLS_FOLDER
from tests.support.tls_proxy import TlsProxy
from tests.support.waiting import DEADLINE_S

AUTHORITY = TLS_FOLDER / "authority.crt"
TOKENS = {role: f"{role}-token-{'x' * 16}" for role in ("searcher", "trainer", "operator", "viewer")}
NEVER_S = 1e6
"""Of every retry: a client that tries again what cannot succeed would hang."""


def proxy(name: str, port: int) -> TlsProxy:
    """TLS with one of the tests' certificates in front of a plain port."""
    return TlsProxy(port, TLS_FOLDER / f"{name}.crt", TLS_FOLDER / f"{name}.key")


@dataclass
class TlsWorld:
    """Everything but trainer and searcher is up, and the prompts are uploaded."""

    folder: Path
    document: dict[str, Any]
    impostors: dict[str, TlsProxy]
    """Certificate -> a server that shows it; whoever believes it reaches nothing."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def recipe(self, **sections: dict[str, Any]) -> Recipe:
        """The recipe of everything; sections override its values."""
        document = dict(self.document)
        for name, values in sections.items():
            document[name] = {**document.get(name, {}), **values}
        return parse_recipe(document, where="recipe of the TLS test")

    def write(self, name: str, **sections: dict[str, Any]) -> Path:
        """A recipe as a file."""
        return write_recipe(self.folder / f"{name}.json", self.recipe(**sections))

    def start(self, kind: str, recipe: Path) -> None:
        """Start `python -m tba_<kind>`."""
        environ = {"PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS)), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{kind}.log").open("ab") as log:
            self.processes[kind] = subprocess.Popen(
                [sys.executable, "-m", f"tba_{kind}", "--config", str(recipe)],
                env={**os.environ, **environ},
                stdout=log,
                stderr=log,
            )

    def log(self, kind: str) -> str:
        """What a process has written."""
        return (self.folder / f"{kind}.log").read_text()

    def wait_until_ready(self, kind: str, url: str) -> None:
        """Until a service answers over https, or has ended."""

        async def wait() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await wait_until_ready(url, str(AUTHORITY))

        try:
            asyncio.run(wait())
        except TimeoutError:
            raise AssertionError(f"{kind} did not start: {self.log(kind)[-3000:]}") from None

    def end(self, *kinds: str) -> None:
        """SIGKILL."""
        for kind in kinds:
            self.processes[kind].kill()
            self.processes[kind].wait()


@contextmanager
def tls_world(folder: Path, model: Path) -> Iterator[TlsWorld]:
    """Start it; the bucket and the prompts are what `tba setup` made."""
    redis = start_redis(folder / "redis")
    store = S3Server(folder / "s3")
    with ExitStack() as stack:
        stack.callback(redis.stop)
        stack.callback(store.kill)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
            patch.delenv(name, raising=False)
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        store.start()
        ports = {name: stack.enter_context(proxy("server", port)).port for name, port in _plain(redis, store)}
        # nobody gets through an impostor, so there is nothing behind it
        impostors = {name: stack.enter_context(proxy(name, free_port())) for name in ("stranger", "expired")}
        world = TlsWorld(folder, _document(folder, model, ports), impostors)
        stack.callback(lambda: world.end(*world.processes))
        path = world.write("recipe")
        for kind in ("buffer", "reward"):
            world.start(kind, path)
            world.wait_until_ready(kind, world.document[kind]["url"])
        assert main(["setup", "--config", str(path), "--create-bucket", "--only", "prompts"]) == 0
        yield world


def _plain(redis: Any, store: S3Server) -> Iterator[tuple[str, int]]:
    yield "redis", redis.port
    yield "store", store.port


def _document(folder: Path, model: Path, ports: dict[str, int]) -> dict[str, Any]:
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    document = tiny_sections(
        model,
        store={
            "url": "s3://tba/runs",
            "endpoint_url": f"https://127.0.0.1:{ports['store']}",
            "ca_file": str(AUTHORITY),
        },
        trainer={"num_steps": ENDLESS, "retry_s": NEVER_S},
        sampling={"samples_per_insert": None},  # a searcher without a trainer finds work at once
        searcher={"retry_s": NEVER_S, "score_retry_s": NEVER_S},
        auth={"tokens_file": str(tokens)},
        tls={
            "cert_file": str(TLS_FOLDER / "server.crt"),
            "key_file": str(TLS_FOLDER / "server.key"),
            "ca_file": str(AUTHORITY),
        },
        tracking={"metrics_path": str(folder / "metrics.jsonl")},
    )
    for name in ("buffer", "reward"):
        port = free_port()
        document[name] |= {"port": port, "url": f"https://127.0.0.1:{port}"}
    document["buffer"]["redis_url"] = f"rediss://127.0.0.1:{ports['redis']}/0"
    return document
