"""`tba export --push-to-hub` against a hub on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from tba.errors import ConfigError
from tba_cli.artifacts import hub_upload
from tba_cli.artifacts.hub_upload import HubRepository
from tba_cli.run_folder import RunFolder
from tests.support.exports import published
from tests.support.hub_server import TOKEN, HubServer
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
NAME = "models/me/sums"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer({}, uploads=tmp_path / "hub")
    yield server
    server.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run that ended, without a history."""
    _, _, recipe = published(tmp_path, {"1-4": make_tiny_model(tmp_path / "model")})
    folder = RunFolder(tmp_path / "runs" / "demo")
    folder.path.mkdir(parents=True)
    for path in (folder.recipe_path, folder.config_path):
        path.write_text(recipe.model_dump_json())
    return tmp_path


def export(place: Path, url: str, *words: str, token: str | None = TOKEN) -> tuple[int, str]:
    """Run the command; return its exit code and output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(place / "hf"),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",  # the stand-in speaks the older protocol
        **({} if token is None else {"HF_TOKEN": token}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tba_cli.main", "export", "demo", *words],
        cwd=place,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_version_is_pushed_with_its_card_to_a_private_repository_and_again(place: Path, hub: HubServer) -> None:
    code, output = export(place, hub.url, "--push-to-hub", "me/sums")
    assert code == 0, output
    assert f"pushed version 1-4 of run 'demo' to {hub.url}/me/sums/commit/" in output
    assert hub.private == {NAME}
    folder = hub.repositories[NAME]
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert "# demo, version 1-4" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").read_bytes() == (place / "model" / "model.safetensors").read_bytes()
    assert not {path.name for path in place.iterdir()} - {"hub", "hf", "model", "runs", "store"}

    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        (folder / name).write_text("of an earlier version")
    code, output = export(place, hub.url, "--push-to-hub", "me/sums", "--out", "here")
    assert code == 0, output
    assert {path.name for path in folder.iterdir()} == names | {"notes.txt"}, "shards of another version must go"
    assert {path.name for path in (place / "here").iterdir()} >= names
    assert len(hub.commits) == 2
    assert hub.commits[0].startswith("version 1-4 of run 'demo', exported by tba ")


def test_a_repository_is_public_only_where_that_is_said(place: Path, hub: HubServer) -> None:
    code, output = export(place, hub.url, "--push-to-hub", "me/sums", "--public")
    assert (code, hub.private, len(hub.commits)) == (0, set(), 1), output
    code, output = export(place, hub.url, "--push-to-hub", "me/sums")
    assert (code, "me/sums exists on the hub and everybody can read it; add --public" in output) == (2, True), output
    assert len(hub.commits) == 1


@pytest.mark.parametrize(
    ("words", "token", "message"),
    [
        (["--push-to-hub", "me/sums"], None, "error: the hub does not let you write to me/sums"),
        (["--push-to-hub", "me/sums"], "hf_other", "error: the hub does not let you write to me/sums"),
        (["--push-to-hub", "a/b/c"], TOKEN, "error: --push-to-hub a/b/c is not OWNER/NAME"),
        (["--push-to-hub", "me/sums", "--version", "7-7"], TOKEN, "no weight version 7-7"),
        (["--public", "--out", "here"], TOKEN, "error: --public says who can read the repository of --push-to-hub"),
        ([], TOKEN, "error: say where to: --out DIR, --push-to-hub OWNER/NAME, or both"),
    ],
)
def test_what_cannot_be_pushed_is_said_in_a_sentence(
    place: Path, hub: HubServer, words: list[str], token: str | None, message: str
) -> None:
    code, output = export(place, hub.url, *words, token=token)
    assert (code, message in output) == (2, True), output
    assert "Traceback" not in output
    assert hub.repositories == {}
    assert not (place / "here").exists()


def test_without_a_network_it_says_so(place: Path) -> None:
    code, output = export(place, "http://127.0.0.1:9", "--push-to-hub", "me/sums")
    assert (code, "error: me/sums could not be pushed to http" in output) == (2, True), output


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The library in this process, whose client is closed after the test."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield monkeypatch
    session = huggingface_hub.get_session()
    client, hooks = type(session), session.event_hooks
    huggingface_hub.set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True, timeout=None))


def test_a_push_that_fails_is_to_be_run_again(hub: HubServer, tmp_path: Path, in_process: pytest.MonkeyPatch) -> None:
    in_process.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    hub.commit_status = 412  # somebody else pushed meanwhile
    repository = HubRepository("me/sums")
    repository.open(public=False)
    with pytest.raises(ConfigError, match=r"me/sums could not be pushed to http.*; run it again: "):
        repository.push(tmp_path / "model", message="m")
    hub.commit_status = 200
    repository.push(tmp_path / "model", message="m")
    assert hub.commits == ["m"]


@pytest.mark.parametrize(
    ("body", "says"),
    [(b"<html>", r"could not be pushed .* \(JSONDecodeError: "), (None, r"could not be pushed .* \(ReadTimeout: ")],
)
def test_a_server_that_is_no_hub_or_never_answers_is_said_in_a_sentence(
    body: bytes | None, says: str, in_process: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    class Stranger(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if body is None:
                is_over.wait(30)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    in_process.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    in_process.setattr(hub_upload, "SILENCE_S", 0.3 if body is None else 30.0)
    try:
        with pytest.raises(ConfigError, match=says):
            HubRepository("me/sums").open(public=False)
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
