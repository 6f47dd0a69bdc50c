"""docs/extending.md: every example is written to a module, named in a recipe as the page says, and really used."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import Failure, Item
from tba_reward.scorers import Tools, build_scorer
from tba_searcher.engines.engine import Engine
from tba_searcher.engines.factory import build_engine
from tba_trainer.learner.learner import Learner
from tba_trainer.model.policy import load_policy
from tba_trainer.tracking import open_trackers

from tba.config import Recipe, load_recipe
from tba.errors import TbaError
from tba.versions import PolicyVersion
from tba_cli.prompts.reader import prompts_of
from tests.support.engine_contract import CASES
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import RecordedBuffer, make_batch, make_recipe
from tests.support.vllm_cases import SIZES, Benches

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = {
    heading: (tomllib.loads(toml), code)
    for heading, toml, code in re.findall(
        r"^## An? ([a-z ]+)\n\n```toml\n(.*?)```\n\n```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL
    )
}
CONTRACT = ["tokens_and_logprobs_are_the_trainers[llama tied]", "weights_in_flight_begin_a_span[llama tied]"]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the page in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for sections, code in EXAMPLES.values():
        name = re.findall(r"my_\w+(?=:)", str(sections))[0]
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=16, num_layers=1)


def recipe_of(example: str, folder: Path | str = "models/none", **sections: dict[str, Any]) -> Recipe:
    """A recipe with the lines of the page."""
    return make_recipe(folder, **{**sections, **EXAMPLES[example][0]})


def test_the_quickstart_takes_an_objective_of_ones_own_as_the_page_says() -> None:
    (command,) = re.findall(r"tba run recipes/quickstart.toml (--set objective.*)", PAGE)
    recipe = load_recipe(ROOT / "recipes" / "quickstart.toml", sets=re.findall(r"--set (\S+)", command))
    assert recipe.objective.preset == "my_objectives:weighted_policy_gradient"


async def test_scorer() -> None:
    (spec,) = recipe_of("scorer").reward.tasks["mine"].scorers
    pool = WorkerPool(num_workers=1, max_memory_bytes=None, start_timeout_s=60.0)
    try:
        scorer = build_scorer(spec, Tools(pool=pool, models=ModelPool()))
        await scorer.start()
        words = {"fine": "a fine day", "rain": "a fine day", "": "a fine day"}
        items = [Item(prompt="?", response=text, data={"word": word}) for word, text in words.items()]
        first, second, third = await scorer.score(items)
    finally:
        await pool.close()
    assert (first, second) == (1.0, 0.0)
    assert isinstance(third, Failure)


def step(recipe: Recipe) -> tuple[torch.Tensor, dict[str, float | None], float]:
    """Make a step on one batch; return gradient, metrics, and how far the weights moved."""
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    learner = Learner(model, recipe, np.random.default_rng(0))
    metrics = learner.gradients(make_batch(0, num_groups=3), step=1, policy_ages=[0] * 12)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    learner.apply(step=1, lineage=1)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return gradient, metrics, float((after - before).norm())


@pytest.mark.parametrize("micro_batch_tokens", [4096, 60, 15])
def test_objective(folder: Path, micro_batch_tokens: int) -> None:
    """It is the preset that the page says, and no other; also where a batch or its groups are cut."""
    trainer = {"micro_batch_tokens": micro_batch_tokens, "max_grad_norm": 1e9}
    own, metrics, moved = step(recipe_of("objective", folder, trainer=trainer))
    assert moved > 0
    loss = metrics["loss"]
    assert loss is not None
    assert np.isfinite(loss)
    for preset, is_same in (("dr_grpo_clamp", True), ("tb", False)):
        built_in, expected, _ = step(make_recipe(folder, objective={"preset": preset, "beta": 0.01}, trainer=trainer))
        distance = float((own - built_in).norm() / built_in.norm())
        assert (distance < 1e-4) == is_same, preset
        if is_same:
            assert loss == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)


def test_an_objective_that_returns_no_term_per_token_ends_the_step_with_a_sentence(folder: Path) -> None:
    Path("my_sums.py").write_text("def total(sequences, tokens, settings, beta):\n    return tokens.logprobs.sum()\n")
    with pytest.raises(TbaError, match=r"'my_sums:total' returned shape .*; it must return one loss term for each of"):
        step(make_recipe(folder, objective={"preset": "my_sums:total"}))


@pytest.mark.parametrize("case", CONTRACT)
def test_engine(tmp_path: Path, case: str) -> None:
    """It answers requests as the contract of all engines says."""
    made = []

    def make(folder: Path, tensors: Path, version: PolicyVersion, dtype: str) -> Engine:
        recipe = make_recipe(folder, searcher={**SIZES, **EXAMPLES["engine"][0]["searcher"]})
        made.append(build_engine(recipe, folder, version, None, seed=1))
        return made[-1]

    model, function = CASES[case]
    function(Benches(make, tmp_path / "models").of(model))
    assert {type(engine).__name__ for engine in made} == {"WatchedEngine"}


def test_tracker(tmp_path: Path) -> None:
    tracking = {"metrics_path": str(tmp_path / "metrics.jsonl"), **EXAMPLES["tracker"][0]["tracking"]}
    trackers = open_trackers(make_recipe("m", tracking=tracking), RecordedBuffer())  # pyright: ignore[reportArgumentType]
    trackers.start(2, PolicyVersion(1, 40))
    trackers.step(PolicyVersion(2, 41), {"loss": 0.5}, skipped=None)
    trackers.close()
    assert Path("demo.csv").read_text().splitlines() == ["# lineage 2 continues from 1-40", "41,0.5"]
    assert trackers.gauges()["num_tracking_failed"] == 0


def test_prompt_source() -> None:
    prompts = prompts_of(recipe_of("prompt source"))
    assert [sum(prompt.split == split for prompt in prompts) for split in ("train", "heldout")] == [100, 10]
    assert prompts[7].data == {"answer": "49"}
