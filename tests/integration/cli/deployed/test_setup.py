"""`tba setup` and `tba model` against real services and a real S3 server."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from tba.clients import BufferClient
from tba.config import load_recipe
from tba.errors import WaitTimeoutError
from tba_cli.main import main
from tba_cli.setup.run_setup import run_setup
from tests.support.deployment import TOKENS, Deployment
from tests.support.model_folder import make_model_folder
from tests.support.redis_process import free_port
from tests.support.s3_server import FaultyProxy


def setup(recipe: Path, *more: str) -> int:
    return main(["setup", "--config", str(recipe), "--wait-s", "120", *more])


def test_without_the_bucket_setup_says_how_to_make_it(deployment: Deployment, capsys: pytest.CaptureFixture) -> None:
    path = deployment.write("no-bucket", store={"url": "s3://not-there"})
    assert setup(path) == 2
    err = capsys.readouterr().err
    assert "bucket 'not-there' does not exist; create it" in err
    assert "`tba setup --create-bucket` makes it" in err


def test_setup_brings_everything_and_a_second_time_changes_nothing(ready: Deployment, capsys) -> None:
    recipe = ready.write("again")
    assert setup(recipe, "--create-bucket") == 0
    out = capsys.readouterr().out
    assert "models/tiny in s3://tba/deep is there already" in out
    assert "prompts: 0 new and 50 known; the run has 40 to train on and 10 held out" in out
    assert "run 'test' is running at step 0; everything is there" in out
    client = BufferClient(ready.document["buffer"]["url"], token=TOKENS["viewer"])
    assert client.stats().num_prompts_train == 40
    client.close()


def test_a_pod_without_the_model_pulls_what_its_service_needs(ready: Deployment, tmp_path, capsys) -> None:
    target = tmp_path / "models" / "tiny"
    recipe = ready.write("pod", model={"path": str(target)})
    assert main(["model", "pull", "--config", str(recipe), "--for", "searcher"]) == 0
    assert "the searcher service needs no folder" in capsys.readouterr().out
    assert not target.exists()
    assert main(["model", "pull", "--config", str(recipe), "--for", "trainer", "--wait-s", "60"]) == 0
    assert (target / "config.json").read_bytes() == (ready.folder / "models/tiny/config.json").read_bytes()
    assert setup(recipe, "--only", "models") == 0  # the pulled models are the same, and nothing is pushed
    assert "is there already" in capsys.readouterr().out


def test_setup_needs_no_copy_of_what_the_store_has_unless_it_is_asked_for(ready: Deployment, tmp_path, capsys) -> None:
    target = tmp_path / "models" / "tiny"
    recipe = ready.write("elsewhere", model={"path": str(target)})
    assert setup(recipe, "--only", "models") == 0
    assert not target.exists()
    assert f"{target}: model tiny is in s3://tba/deep" in capsys.readouterr().out
    assert setup(recipe, "--only", "models", "--pull") == 0
    assert (target / "model.safetensors").is_file()


def test_a_model_that_is_nowhere_is_one_sentence(ready: Deployment, capsys: pytest.CaptureFixture) -> None:
    recipe = ready.write("nowhere", model={"path": "models/never-pushed"})
    assert setup(recipe, "--only", "models") == 2
    assert "model.path: model models/never-pushed is neither here nor in s3://tba/deep" in capsys.readouterr().err


def test_a_task_that_nothing_scores_stops_setup_before_a_prompt_is_uploaded(ready, tmp_path, capsys):
    rows = [
        {"prompt_id": f"p{split}", "task": "juggling", "text": "t", "data": {}, "split": split}
        for split in ("train", "heldout")
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    recipe = ready.write("unscored", data={"generator": None, "path": str(path)})
    assert setup(recipe, "--only", "prompts") == 2
    assert (
        "has the task 'juggling', which no reward scores and no environment plays; known are" in capsys.readouterr().err
    )
    client = BufferClient(ready.document["buffer"]["url"], token=TOKENS["viewer"])
    assert client.stats().num_prompts_train == 40
    client.close()


@pytest.mark.parametrize("is_silent", [False, True])
def test_services_that_do_not_come_end_setup_at_its_deadline(ready: Deployment, is_silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if is_silent else free_port()
        recipe = ready.recipe(buffer={"url": f"http://127.0.0.1:{port}"})
        begun_s = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"wait 'buffer-start': .* was not ready within .*"):
            run_setup(
                recipe, wait_s=1, create_bucket=False, prepare=False, pull=False, only="prompts", on_progress=print
            )  # fmt: skip
        assert time.monotonic() - begun_s < 20


def test_a_port_that_nobody_knows_is_one_sentence(ready: Deployment, capsys: pytest.CaptureFixture) -> None:
    recipe = ready.write("port-0", buffer={"port": 0, "url": None})
    assert setup(recipe) == 2
    assert "buffer.port is 0 and buffer.url is not given" in capsys.readouterr().err


def test_setup_waits_for_a_store_that_is_still_starting(ready: Deployment) -> None:
    proxy = FaultyProxy(ready.store_server.port)
    proxy.faults = [503] * 60
    said: list[str] = []
    with proxy:
        recipe = ready.recipe(store={"endpoint_url": proxy.url})

        def start() -> None:
            while not said:
                pass_time.wait(0.01)
            proxy.faults.clear()

        pass_time = threading.Event()
        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        run_setup(
            recipe, wait_s=60, create_bucket=False, prepare=False, pull=False, only="models", on_progress=said.append
        )  # fmt: skip
        thread.join(60)
    assert "wait 'store-start' (60 s at most)" in said[0]
    assert "the server kept answering 503" in said[0]
    assert "is there already" in said[-1]


def test_the_starting_model_is_made_once(ready: Deployment, tmp_path, capsys, monkeypatch) -> None:
    def make(_module: str, words: list[str]) -> str:
        folder = Path(load_recipe(words[1]).model.path)
        make_model_folder(folder)
        (folder / "warmstart.json").write_text('{"seed": 7}')
        return ""

    monkeypatch.setattr("tba_cli.setup.artifacts.run_program", make)
    warm = {"task": "addition"}
    for place, made in (("a", True), ("b", False)):  # in another container nothing is made
        path = tmp_path / place / "models" / "made-{seed}"
        assert setup(ready.write(place, model={"path": str(path), "warm_start": warm}), "--only", "models") == 0
        out = capsys.readouterr().out
        assert ("making the starting model" in out, "models/made-0 in s3://tba/deep is pushed" in out) == (made, made)
        assert ("was made with run.seed = 7, not 0" in out) is not made
