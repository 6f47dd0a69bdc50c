"""The program in the pod of `helm test`, against a real buffer and a real reward service with tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.integration.conftest import redis, serve_buffer
from tests.support.buffer import make_prompts, make_recipe, start_lineage, write_recipe
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.chart import load_script
from tests.support.redis_process import free_port
from tests.support.reward_process import reward_of

__all__ = ["redis", "serve_buffer"]
TOKENS = {role: f"{role}-0123456789abcdef" for role in ("searcher", "trainer", "operator", "viewer")}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The file that the chart puts into the pod."""
    return load_script("helm_test")


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token for each role."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


@pytest.fixture(scope="module")
def reward_url(tmp_path_factory: pytest.TempPathFactory, tokens_file: Path) -> Iterator[str]:
    """A reward service that wants tokens."""
    folder, auth = tmp_path_factory.mktemp("reward"), {"tokens_file": str(tokens_file)}
    recipe = make_recipe(reward={"port": free_port(), "num_workers": 1}, auth=auth)
    url = f"http://127.0.0.1:{recipe.reward.port}"
    with reward_of(write_recipe(folder / "recipe.json", recipe), url):
        yield url


def config(folder: Path, buffer_url: str, reward_url: str, tokens_file: Path) -> list[str]:
    """Arguments of the script."""
    for role in ("searcher", "viewer"):  # the pod sees these two alone
        (folder / f"{role}.json").write_text(json.dumps({role: json.loads(tokens_file.read_text())[role]}))
    auth = {"tokens_file": str(folder / "searcher.json")}
    recipe = make_recipe(buffer={"url": buffer_url}, reward={"url": reward_url}, auth=auth)
    viewer = ["--viewer-tokens", str(folder / "viewer.json")]
    return ["--config", str(write_recipe(folder / "recipe.json", recipe)), *viewer, "--wait-s", "0.2"]


def test_a_release_that_works_passes_and_no_batch_gets_the_rollout(
    script: ModuleType,
    serve_buffer: ServeBuffer,
    reward_url: str,
    tokens_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    buffer = serve_buffer(tokens=TOKENS)
    operator = buffer.client(token=TOKENS["operator"])
    arguments = config(tmp_path, buffer.url, reward_url, tokens_file)
    assert script.main(arguments) == 1  # nothing to answer yet: no prompts
    assert "look at the setup Job" in capsys.readouterr().err
    operator.upload_prompts(make_prompts(2))
    start_lineage(buffer.client(token=TOKENS["trainer"]))
    for count in (1, 2):
        assert script.main(arguments) == 0
        out = capsys.readouterr().out
        assert "without a token gets 401" in out
        assert "as a viewer gets 403" in out
        stats = operator.stats()
        assert (stats.num_failed, stats.num_scored, stats.num_pending) == (count, 0, 0)
    assert operator.list_rollouts(limit=1).rollouts[0].response_text == "pushed by helm test"


def test_services_that_let_everybody_in_fail(
    script: ModuleType,
    serve_buffer: ServeBuffer,
    reward_url: str,
    tokens_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    buffer = serve_buffer()
    assert script.main(config(tmp_path, buffer.url, reward_url, tokens_file)) == 1
    assert "/v1/run without a token got 200, not 401" in capsys.readouterr().err
