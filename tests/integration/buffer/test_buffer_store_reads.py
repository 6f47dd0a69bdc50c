"""What answers have from the object store: the tokenizer of GET /v1/rollouts/{rollout_id}, and GET /v1/versions."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from structlog.testing import capture_logs
from tba_buffer.rollouts import token_texts
from tokenizers import Tokenizer, decoders, models

from tba.api import VersionRequest
from tba.clients import BufferClient
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Rollout, encode_rollout
from tests.support.buffer import make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.weight_chain import publish_files


def tokenizer_json() -> str:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "four": 1, "ty": 2, " two": 3}, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return core.to_str()


TOKENIZER: Any = {"tokenizer.json": tokenizer_json()}


def publish(folder: Path, version: PolicyVersion, parent: PolicyVersion | None = None, **files: str) -> None:
    """Publish a version with these files beside `config.json`."""
    made = folder / "made" / str(version)
    made.mkdir(parents=True)
    save_file({"a": np.zeros(10, dtype=np.float32)}, made / "model.safetensors")
    for name, text in {"config.json": "{}", **files}.items():
        (made / name).write_text(text)
    store, tensors = WeightVersions(FileStore(folder / "store"), "test"), [made / "model.safetensors"]
    publish_files(store, version, tensors, {name: made / name for name in ("config.json", *files)}, parent=parent)


def with_rollout(serve_buffer: ServeBuffer, folder: Path, **changes: Any) -> tuple[BufferClient, Rollout]:
    client = serve_buffer(store={"url": f"file://{folder / 'store'}"}).with_prompts(2)
    client.push([encode_rollout(rollout := make_rollout(**changes))])
    return client, rollout


def texts(client: BufferClient, rollout: Rollout) -> list[str] | None:
    return client.get_rollout(rollout.rollout_id.hex()).token_texts


def test_the_text_of_each_token_and_the_data_of_the_prompt(serve_buffer: ServeBuffer, tmp_path: Path) -> None:
    publish(tmp_path, START, **TOKENIZER)
    client, rollout = with_rollout(serve_buffer, tmp_path, prompt_id="train-1")
    detail = client.get_rollout(rollout.rollout_id.hex())
    assert (detail.response_tokens, detail.token_texts) == ([1, 2, 3], ["four", "ty", " two"])
    assert detail.prompt_data == {"answer": 2}
    assert detail.model_dump_json() == client.get_rollout(rollout.rollout_id.hex()).model_dump_json()


def test_the_newest_version_serves_where_older_ones_are_deleted(serve_buffer: ServeBuffer, tmp_path: Path) -> None:
    newest = PolicyVersion(1, 4)
    publish(tmp_path, newest, **TOKENIZER)
    client, rollout = with_rollout(serve_buffer, tmp_path)
    lineage = start_lineage(client)
    client.announce_version(VersionRequest(version=str(newest), token=lineage.token))
    assert texts(client, rollout) == ["four", "ty", " two"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("no file", "the model has no tokenizer.json"),
        ("not a tokenizer", "Exception"),
        ("damaged", "is damaged"),
        ("no version", "weight version 0-0 of run test does not exist"),
        ("no package", "pip install tokenizers"),
    ],
)
def test_without_a_tokenizer_there_are_no_texts_and_one_line_in_the_log(
    serve_buffer: ServeBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, why: str
) -> None:
    if case == "no package":
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    if case != "no version":
        files = {"no file": {}, "not a tokenizer": {"tokenizer.json": "{}"}}
        publish(tmp_path, START, **files.get(case, {"tokenizer.json": "x" * 10}))
    if case == "damaged":
        (stored,) = (tmp_path / "store").rglob("tokenizer.json")
        stored.chmod(0o644)
        stored.write_text("y" * 10)
    monkeypatch.setattr(token_texts, "RETRY_S", 0.0)  # tried again by every request, and said once
    client, rollout = with_rollout(serve_buffer, tmp_path)
    with capture_logs() as logs:
        assert [texts(client, rollout) for _ in range(3)] == [None] * 3
    said = [line["problem"] for line in logs if line["event"] == "no_token_texts"]
    assert len(said) == 1
    assert why in said[0]


def test_a_late_store_is_found(serve_buffer: ServeBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, rollout = with_rollout(serve_buffer, tmp_path)
    assert texts(client, rollout) is None
    publish(tmp_path, START, **TOKENIZER)
    assert texts(client, rollout) is None  # not asked again so soon
    monkeypatch.setattr(token_texts, "RETRY_S", 0.0)
    client, rollout = with_rollout(serve_buffer, tmp_path)
    assert texts(client, rollout) == ["four", "ty", " two"]


def test_a_slow_store_holds_no_request_for_long(
    serve_buffer: ServeBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, START, **TOKENIZER)
    released, original = Event(), token_texts.load_tokenizer

    def slow(*arguments: Any) -> Any:
        assert released.wait(60)
        return original(*arguments)

    monkeypatch.setattr(token_texts, "load_tokenizer", slow)
    monkeypatch.setattr(token_texts, "LOAD_WAIT_S", 0.05)
    client, rollout = with_rollout(serve_buffer, tmp_path)
    assert [texts(client, rollout) for _ in range(2)] == [None, None]
    released.set()
    monkeypatch.setattr(token_texts, "LOAD_WAIT_S", 60.0)
    assert texts(client, rollout) == ["four", "ty", " two"]


def test_versions_are_listed_newest_first_and_a_damaged_manifest_hides_no_other(
    serve_buffer: ServeBuffer, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    client = serve_buffer(store={"url": f"file://{tmp_path / 'store'}"}).client()
    assert client.list_versions().versions == []
    publish(tmp_path, START)
    for step in (2, 10):
        publish(tmp_path, PolicyVersion(1, step), START)
    found = client.list_versions()
    assert [one.version for one in found.versions] == ["1-10", "1-2", "0-0"]
    assert (found.versions[0].parent, found.versions[0].dtype, found.num_older) == ("0-0", "float32", 0)
    assert found.versions[0].num_bytes >= 40
    publish(tmp_path, PolicyVersion(1, 11), START)
    next((tmp_path / "store").rglob("weights/1-11/manifest.json")).write_bytes(b"{")
    for _ in range(2):
        assert [one.version for one in client.list_versions().versions] == ["1-10", "1-2", "0-0"]
