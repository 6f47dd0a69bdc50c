"""Token texts and prompt data of GET /v1/rollouts/{rollout_id}: the tokenizer comes from the object store."""

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
from tests.support.buffer import make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.weight_chain import publish_files


def tokenizer_json() -> str:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "four": 1, "ty": 2, " two": 3}, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return core.to_str()


def publish(folder: Path, version: PolicyVersion, **files: str) -> None:
    """Publish a version with these files beside `config.json`."""
    made = folder / "made" / str(version)
    made.mkdir(parents=True)
    save_file({"a": np.zeros(1, dtype=np.float32)}, made / "model.safetensors")
    for name, text in {"config.json": "{}", **files}.items():
        (made / name).write_text(text)
    store, tensors = WeightVersions(FileStore(folder / "store"), "test"), [made / "model.safetensors"]
    publish_files(store, version, tensors, {name: made / name for name in ("config.json", *files)}, parent=None)


def with_rollout(serve_buffer: ServeBuffer, folder: Path, **changes: Any) -> tuple[BufferThread, BufferClient, Rollout]:
    buffer = serve_buffer(store={"url": f"file://{folder / 'store'}"})
    client, rollout = buffer.client(), make_rollout(**changes)
    client.upload_prompts(make_prompts(2))
    client.push([encode_rollout(rollout)])
    return buffer, client, rollout


def texts(client: BufferClient, rollout: Rollout) -> list[str] | None:
    return client.get_rollout(rollout.rollout_id.hex()).token_texts


def test_the_text_of_each_token_and_the_data_of_the_prompt(serve_buffer: ServeBuffer, tmp_path: Path) -> None:
    publish(tmp_path, START, **{"tokenizer.json": tokenizer_json()})
    _, client, rollout = with_rollout(serve_buffer, tmp_path, prompt_id="train-1")
    detail = client.get_rollout(rollout.rollout_id.hex())
    assert (detail.response_tokens, detail.token_texts) == ([1, 2, 3], ["four", "ty", " two"])
    assert detail.prompt_data == {"answer": 2}
    assert detail.model_dump_json() == client.get_rollout(rollout.rollout_id.hex()).model_dump_json()


def test_the_newest_version_serves_where_older_ones_are_deleted(serve_buffer: ServeBuffer, tmp_path: Path) -> None:
    newest = PolicyVersion(1, 4)
    publish(tmp_path, newest, **{"tokenizer.json": tokenizer_json()})
    _, client, rollout = with_rollout(serve_buffer, tmp_path)
    lineage = start_lineage(client)
    client.announce_version(VersionRequest(version=str(newest), token=lineage.token))
    assert texts(client, rollout) == ["four", "ty", " two"]


@pytest.mark.parametrize("case", ["no file", "not a tokenizer", "damaged", "no version", "no package"])
def test_without_a_tokenizer_there_are_no_texts_and_one_line_in_the_log(
    serve_buffer: ServeBuffer, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
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
    _, client, rollout = with_rollout(serve_buffer, tmp_path)
    with capture_logs() as logs:
        assert [texts(client, rollout) for _ in range(3)] == [None] * 3
    said = [line["problem"] for line in logs if line["event"] == "no_token_texts"]
    assert len(said) == 1
    expected = {
        "no file": "the model has no tokenizer.json",
        "not a tokenizer": "Exception",
        "damaged": "is damaged",
        "no version": "weight version 0-0 of run test does not exist",
        "no package": "install tba-buffer[tokens]",
    }
    assert expected[case] in said[0]


def test_a_store_that_comes_later_is_found(
    serve_buffer: ServeBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, rollout = with_rollout(serve_buffer, tmp_path)
    assert texts(client, rollout) is None
    publish(tmp_path, START, **{"tokenizer.json": tokenizer_json()})
    assert texts(client, rollout) is None  # not asked again so soon
    monkeypatch.setattr(token_texts, "RETRY_S", 0.0)
    buffer, client, rollout = with_rollout(serve_buffer, tmp_path)
    assert texts(client, rollout) == ["four", "ty", " two"]
    assert buffer.is_alive


def test_a_slow_store_holds_no_request_for_long(
    serve_buffer: ServeBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, START, **{"tokenizer.json": tokenizer_json()})
    released, original = Event(), token_texts.load_tokenizer

    def slow(*arguments: Any) -> Any:
        assert released.wait(60)
        return original(*arguments)

    monkeypatch.setattr(token_texts, "load_tokenizer", slow)
    monkeypatch.setattr(token_texts, "LOAD_WAIT_S", 0.05)
    _, client, rollout = with_rollout(serve_buffer, tmp_path)
    assert [texts(client, rollout) for _ in range(2)] == [None, None]
    released.set()
    monkeypatch.setattr(token_texts, "LOAD_WAIT_S", 60.0)
    assert texts(client, rollout) == ["four", "ty", " two"]
