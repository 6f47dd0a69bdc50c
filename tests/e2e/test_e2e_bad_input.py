"""Bad input as a user or a broken client meets it: one sentence, and nothing has changed.

tests/integration/cli/test_local_run.py has the refusals of `tba run` before it starts a child; here are the errors that
only real services find, and bytes on the wire of real services.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from tba.clients import BufferClient
from tba.wire import encode_heartbeat
from tba.wire.heartbeat import Heartbeat
from tba_cli.main import main
from tests.e2e.conftest import MakePlace
from tests.support.buffer import start_lineage, stored_run
from tests.support.e2e import Services, start_services, until
from tests.support.reward_process import is_ready

MAX_BODY_BYTES = 64 * 1024
MSGPACK = {"content-type": "application/msgpack"}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"buffer": {"port": 0, "max_rollouts": 3}}, "no batch could ever be drawn"),
        (
            {"reward": {"port": 0, "tasks": {"t": {"scorers": [{"kind": "python", "function": "no_such_module:f"}]}}}},
            "there is no module 'no_such_module'",
        ),
    ],
)
def test_what_only_a_service_can_refuse_ends_the_run_with_its_sentence(
    make_place: MakePlace, sections: dict[str, Any], sentence: str
) -> None:
    place = make_place(**sections)
    started = place.start()
    assert started.wait() in (1, 2)
    assert started.err.startswith("error: ")
    assert started.err.count("\n") == 1
    assert sentence in started.err
    assert "Traceback" not in started.out + started.err
    assert place.pids() == []
    assert not (place.folder / "recipe.json").exists(), "there is nothing to resume"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "data.num_heldout=100000"], "task 'addition' has"),
        (["--set", "data.generator=nonsense"], "data.generator 'nonsense' is not known here"),
        (["--set", "auth.tokens_file=nowhere.json"], "nowhere.json cannot be read"),
        (["--set", "store.url=ftp://x"], "store.url 'ftp://x' is not a store"),
        (["--set", "store.url=file:///proc/x"], "correct store.url"),
        (["--set", "local.runs_dir=recipe.json"], "recipe.json"),
        (["--run-name", "../x"], "key 'run.name' has the value '../x'"),
        (["--seed", "-1"], "key 'run.seed' has the value -1"),
    ],
)
def test_a_value_that_cannot_be_is_one_sentence(
    make_place: MakePlace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    place = make_place()
    monkeypatch.chdir(place.path)
    assert main(["run", "recipe.json", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert sentence in said
    assert not place.folder.exists()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Services]:
    """Buffer and reward service in which nothing moves by itself."""
    folder = tmp_path_factory.mktemp("services")
    services = start_services(folder, model, buffer={"max_body_bytes": MAX_BODY_BYTES})
    try:
        client = BufferClient(services.recipe.buffer_url)
        start_lineage(client)
        client.close()
        until("the reward service answers", lambda: is_ready(services.recipe.reward_url))
        yield services
    finally:
        services.stop()


def everything(services: Services) -> Sequence[BaseModel]:
    """Counts, run and ledger of the buffer; not the rates, which change by themselves, nor how often a heartbeat was
    refused."""
    client = BufferClient(services.recipe.buffer_url)
    try:
        return (
            client.stats().model_copy(update={"rates": None, "heartbeats_refused": {}}),
            stored_run(client),
            client.ledger(),
        )
    finally:
        client.close()


def changed(before: Sequence[BaseModel], after: Sequence[BaseModel]) -> dict[str, tuple[object, object]]:
    """Fields that differ: a whole run is too long to be read in a report."""
    return {
        f"{type(old).__name__}.{name}": (value, getattr(new, name))
        for old, new in zip(before, after, strict=True)
        for name, value in old
        if value != getattr(new, name)
    }


BAD_BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "nothing": (b"", JSON),
    "deeply nested JSON": (b"[" * 30_000, JSON),
    "a text that UTF-8 cannot hold": (b'{"reason": "\\ud800", "token": "\\ud800"}', JSON),
    "a msgpack array that promises too much": (b"\xdd\xff\xff\xff\xff", MSGPACK),
    "deeply nested msgpack": (b"\x91" * 30_000, MSGPACK),
    "too many bytes": (b" " * (MAX_BODY_BYTES + 1), JSON),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_no_endpoint_takes_a_bad_body_or_changes_anything(services: Services, name: str) -> None:
    body, headers = BAD_BODIES[name]
    before = everything(services)
    num_endpoints = 0
    for base in (services.recipe.buffer_url, services.recipe.reward_url):
        paths: dict[str, Any] = httpx2.get(f"{base}/openapi.json", timeout=60).json()["paths"]
        for path in (path for path, methods in paths.items() if "post" in methods):
            url = base + path.replace("{command}", "pause").replace("{eval_id}", "e").replace("{batch_id}", "b")
            check_refused(httpx2.post(url, content=body, headers=headers, timeout=60), max_status=422)
            num_endpoints += 1
    assert num_endpoints >= 15
    assert changed(before, everything(services)) == {}


def check_refused(response: Any, *, max_status: int) -> None:
    what = f"{response.request.method} {response.request.url}: {response.status_code} {response.text[:300]}"
    assert 400 <= response.status_code <= max_status, what
    assert response.headers["content-type"] == "application/problem+json", what
    problem = response.json()
    assert problem["status"] == response.status_code, what
    assert problem["type"].startswith("urn:tba:problem:"), what
    assert problem["detail"], what
    assert "\n" not in problem["detail"], what


def test_a_heartbeat_of_another_run_is_refused(services: Services) -> None:
    before = everything(services)
    beat = Heartbeat(
        component_id="s", kind="searcher", run="another", state="running", version=None, wait=None, gauges={}
    )
    url = f"{services.recipe.buffer_url}/v1/heartbeats"
    check_refused(httpx2.post(url, content=encode_heartbeat(beat), headers=MSGPACK, timeout=60), max_status=409)
    assert changed(before, everything(services)) == {}
