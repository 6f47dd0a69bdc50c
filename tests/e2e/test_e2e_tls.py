"""A run with TLS on every link trains; a process that meets a wrong certificate, or no TLS, says so and ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tba_searcher.service import run_searcher
from tba_trainer.trainer import run_trainer

from tba.clients import BufferClient
from tba.config import Recipe, load_recipe
from tba.errors import StoreTlsError, TlsError
from tba_cli.doctor import run_checks
from tba_cli.doctor.checks import CHECKS
from tba_cli.doctor.target import target_of
from tba_cli.local.services import wait_until_ready
from tba_cli.main import main
from tests.support.buffer import start_service
from tests.support.deployment import Described
from tests.support.e2e import ENDLESS, tiny_sections
from tests.support.redis_process import free_port, start_redis
from tests.support.s3_server import CREDENTIALS, S3Server
from tests.support.served_app import TLS_FOLDER
from tests.support.tls_proxy import TlsProxy
from tests.support.waits import DEADLINE_S, until

AUTHORITY = TLS_FOLDER / "authority.crt"
TOKENS = {role: f"{role}-token-{'x' * 16}" for role in ("searcher", "trainer", "operator", "viewer")}


def proxy(name: str, port: int) -> TlsProxy:
    return TlsProxy(port, TLS_FOLDER / f"{name}.crt", TLS_FOLDER / f"{name}.key")


@dataclass
class TlsWorld(Described):
    """Everything but trainer and searcher is up, and the prompts are uploaded."""

    impostors: dict[str, TlsProxy]
    """Certificate -> a server that shows it; there is nothing behind the server."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, kind: str, recipe: Path) -> None:
        self.processes[kind] = start_service(f"tba_{kind}", recipe, self.folder / f"{kind}.log")

    def log(self, kind: str) -> str:
        return (self.folder / f"{kind}.log").read_text()

    def end(self, *kinds: str) -> None:
        for kind in kinds:
            self.processes[kind].kill()
            self.processes[kind].wait()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[TlsWorld]:
    """A run that has trained over TLS, and whose trainer and searcher are gone; it may continue. The bucket and the
    prompts are what `tba setup` made."""
    folder = tmp_path_factory.mktemp("tls")
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
        plain = {"redis": redis.port, "store": store.port}
        ports = {name: stack.enter_context(proxy("server", port)).port for name, port in plain.items()}
        # no connection gets through an impostor, so there is nothing behind it
        impostors = {name: stack.enter_context(proxy(name, free_port())) for name in ("stranger", "expired")}
        world = TlsWorld(folder, _document(folder, model, ports), impostors)
        stack.callback(lambda: world.end(*world.processes))
        path = world.write("recipe")
        for kind in ("buffer", "reward"):
            world.start(kind, path)
            ready = wait_until_ready(world.document[kind]["url"], str(AUTHORITY))
            asyncio.run(asyncio.wait_for(ready, DEADLINE_S))
        assert main(["setup", "--config", str(path), "--create-bucket", "--only", "prompts"]) == 0
        _train(world)
        yield world


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
        trainer={"num_steps": ENDLESS},
        sampling={"samples_per_insert": None},  # a searcher without a trainer finds work at once
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


STEPS = 4
"""Optimizer steps, over which two versions are published and used."""
MOST_CONNECTIONS = 4
"""Most connections of one client until it gives up: no storm."""
FAULTS = ("stranger", "expired")
RUN: dict[str, Callable[[Recipe], object]] = {"trainer": run_trainer, "searcher": run_searcher}


def _train(world: TlsWorld) -> None:
    path = world.write("recipe")
    world.start("trainer", path)
    world.start("searcher", path)
    client = BufferClient(world.document["buffer"]["url"], token=TOKENS["viewer"], ca_file=str(AUTHORITY), retry_s=20)

    def has_trained() -> bool:
        for kind, process in world.processes.items():
            assert process.poll() is None, world.log(kind)[-3000:]
        info, stats = client.run(), client.stats()
        searchers = [item for item in info.components if item.kind == "searcher" and item.alive]
        used = any(item.version not in (None, "0-0") for item in searchers)
        return info.step >= STEPS and stats.num_scored > 0 and used

    try:
        until(f"{STEPS} steps over TLS", has_trained)
    finally:
        client.close()
    world.end("trainer", "searcher")


def test_a_run_trains_over_tls_and_status_and_doctor_look_at_it(world: TlsWorld, capsys) -> None:
    url = ("--url", world.document["buffer"]["url"], "--ca-file", str(AUTHORITY))
    assert main(["status", "--json", *url, "--token-file", world.document["auth"]["tokens_file"]]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["step"] >= STEPS
    target = target_of(load_recipe(world.write("well"), environ={}), service="buffer")
    found = run_checks(target, checks=[(name, CHECKS[name]) for name in ("services", "store")])
    assert [result for result in found if result.level == "fail"] == []
    assert {"service", "store-parts"} <= {result.code for result in found if result.level == "ok"}
    for kind in ("trainer", "searcher", "buffer", "reward"):
        assert "Traceback" not in world.log(kind)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("service", "link"), [("trainer", "store"), ("searcher", "buffer"), ("searcher", "reward")])
def test_a_process_that_cannot_have_tls_says_so_in_a_sentence_and_ends(world, service, link, fault):
    recipe = world.recipe(**_changed(world, link, fault))
    before = _num_connections(world)
    with pytest.raises(StoreTlsError if link == "store" else TlsError) as raised:
        RUN[service](recipe)
    _assert_says(str(raised.value), world, link, fault)
    assert _num_connections(world) - before <= MOST_CONNECTIONS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_command_that_cannot_have_tls_says_so(world: TlsWorld, fault: str, capsys) -> None:
    url = _changed(world, "buffer", fault)["buffer"]["url"]
    tokens_file = world.document["auth"]["tokens_file"]
    assert main(["status", "--url", url, "--ca-file", str(AUTHORITY), "--token-file", tokens_file]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    _assert_says(said, world, "buffer", fault)


def _changed(world: TlsWorld, link: str, fault: str) -> dict[str, dict[str, Any]]:
    section, key = {"buffer": ("buffer", "url"), "reward": ("reward", "url"), "store": ("store", "endpoint_url")}[link]
    address: str = world.document[section][key]
    scheme = address.partition("://")[0]
    port = world.impostors[fault].port
    return {section: {key: f"{scheme}://127.0.0.1:{port}"}}


def _assert_says(said: str, world: TlsWorld, link: str, fault: str) -> None:
    setting = "store.ca_file" if link == "store" else "tls.ca_file"
    assert f"127.0.0.1:{world.impostors[fault].port}" in said
    assert f"{setting} {AUTHORITY} must be a PEM file with the authority" in said
    assert ("is not accepted (certificate has expired)" in said) == (fault == "expired")


def _num_connections(world: TlsWorld) -> int:
    return sum(impostor.num_connections for impostor in world.impostors.values())
