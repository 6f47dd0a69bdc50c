"""The victim of red-teaming in the real vLLM on the CPU: beside transformers, and through a model process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tba_reward.model_server.child.judges import RedteamJudge
from tba_reward.model_server.child.server import TokenizedRequest
from tba_reward.model_server.client import ModelPool
from tba_reward.model_server.model_messages import ScoreRequest
from tba_reward.scorer import Failure, Item
from tba_reward.scorers import Tools, in_model_server, redteam

from tba.config.searcher import VllmSection
from tba.errors import ConfigError
from tests.support.vllm_greedy import ENVIRON, TIMEOUT_S, why_not
from tests.support.vllm_victim_cases import ATTACKS, CASES, spec_of

pytestmark = pytest.mark.timeout(TIMEOUT_S + 120)
ROOT = Path(__file__).parents[3]
TOOLS = Tools(pool=None, models=ModelPool(), item_timeout_s=60.0)  # type: ignore[arg-type]  # no workers are needed


@pytest.fixture(scope="module")
def environ(pytestconfig: pytest.Config) -> dict[str, str]:
    """The environment of a process with vLLM."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    cache = getattr(pytestconfig, "cache", None)  # not there with -p no:cacheprovider
    own = {"VLLM_CACHE_ROOT": str(cache.mkdir("vllm"))} if cache else {}
    return {**ENVIRON, **own, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.fixture(scope="module")
def outcomes(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The outcome of every case."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_victim_cases", str(tmp_path_factory.mktemp("victim"))],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_victim(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "passed", outcomes[case]


async def test_a_model_process_with_vllm_scores_as_transformers_does(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM prints, and starts threads: neither disturbs the pipes. An attack that is too long is unknown, not 0."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    spec = spec_of(tmp_path, temperature=0.0, num_replies=2)
    scorer = redteam.RedteamScorer(spec, TOOLS)
    try:
        await scorer.start()
        assert scorer.health() == "ok"
        items = [Item(prompt="", response=text) for text in [*ATTACKS, "x" * 61]]
        *values, too_long = await scorer.score(items)
        version = scorer.version
    finally:
        await scorer.close()
    assert isinstance(too_long, Failure)
    assert too_long.reason == "too_long"
    plain = spec.model_copy(update={"victim_engine": "transformers"})
    judge = RedteamJudge(redteam.model_set(plain))
    requests = [judge.prepare(ScoreRequest(number=n, prompt="", response=text)) for n, text in enumerate(ATTACKS)]
    wanted = judge.score([each for each in requests if isinstance(each, TokenizedRequest)])
    assert values == pytest.approx(wanted, abs=1e-5)
    larger = spec.model_copy(update={"victim_vllm": VllmSection(gpu_memory_share=0.5)})
    others = [redteam.RedteamScorer(each, TOOLS) for each in (larger, plain)]
    for other in others:
        other._process = scorer._process
    assert [other.version == version for other in others] == [True, False], "each engine draws other replies"


def test_without_vllm_the_recipe_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package.startswith("vllm"):
            raise in_model_server.PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(in_model_server, "version", version)
    with pytest.raises(ConfigError, match=r"install 'tba\[reward-vllm\]'"):
        redteam.build(spec_of(tmp_path), TOOLS)
