"""The learning curve of a finished run of the quickstart: accuracy of every published version, and when it was there.

Measured after the run, so it costs the run nothing and its resolution is `trainer.sync_interval`. Set
`trainer.keep_versions = KEEP_ALL` in the run, or garbage collection deletes most versions.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tba_searcher.engines.tokenizer import TextCodec
from torch import Tensor
from transformers import AutoModelForCausalLM

from studies.whole_runs import records_of
from tba.api import Prompt
from tba.config import parse_recipe
from tba.errors import ConfigError
from tba.store import FileStore
from tba.weights import WeightVersions
from tba_cli.prompts.reader import heldout_prompts
from tba_cli.run_folder import RunFolder

KEEP_ALL = 1_000_000
"""For `trainer.keep_versions`."""
NUM_PROMPTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published version."""

    train_s: float
    """Seconds from the start of training to the end of the step that made it; 0 for the starting model."""
    step: int
    pass_at_1: float
    """Probability of the right response at the policy temperature, mean over the prompts."""
    greedy: float
    """Share of right greedy answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The versions of one run, oldest first."""

    started_at_s: float
    """Unix seconds of the start of training."""
    points: tuple[Point, ...]


def learning_curve(run_folder: Path) -> Curve:
    """Measure the versions of a finished local run.

    Raises:
        ConfigError: the run was started more than once.
    """
    folder = RunFolder(run_folder)
    recipe = parse_recipe(json.loads(folder.recipe_path.read_text()), where=str(folder.recipe_path))
    seconds, started_at_s = _step_times(folder.path / "metrics.jsonl")
    versions = WeightVersions(FileStore(folder.store_path), recipe.run.name)
    chosen = [version for version in versions.versions() if version.step == 0 or version.step in seconds]
    points = list[Point]()
    with tempfile.TemporaryDirectory(prefix="tba-learning-curve-") as scratch:
        model_folder = Path(scratch) / "model"
        model_folder.mkdir()
        versions.download_model(chosen[0], model_folder)
        judge = Judge(model_folder, heldout_prompts(recipe)[:NUM_PROMPTS], temperature=recipe.model.policy_temperature)
        for version in chosen:
            weights = versions.download_tensors(version, Path(scratch) / str(version))
            pass_at_1, greedy = judge.measure(
                {name: tensor.float() for path in weights.paths for name, tensor in load_file(path).items()}
            )
            points.append(
                Point(
                    train_s=round(seconds.get(version.step, 0.0), 3),
                    step=version.step,
                    pass_at_1=round(pass_at_1, 5),
                    greedy=round(greedy, 5),
                )
            )
            shutil.rmtree(Path(scratch) / str(version))
    return Curve(started_at_s=started_at_s, points=tuple(points))


class Judge:
    """Measures models of one shape on the same prompts, of which `data.answer` is the only right response."""

    def __init__(self, model_folder: Path, prompts: list[Prompt], *, temperature: float) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
        self._temperature, self._num_prompts = temperature, len(prompts)
        codec = TextCodec(model_folder)
        # in batches of one length: no padding that could be treated in two ways
        self._groups: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for prompt in prompts:
            # its tokenizer adds no special tokens
            ids, answer = codec.encode_prompt(prompt.text), codec.encode_prompt(prompt.data["answer"]) + codec.eos_ids
            self._groups.setdefault((len(ids), len(answer)), []).append((ids, answer))

    @torch.no_grad()
    def measure(self, tensors: dict[str, Tensor]) -> tuple[float, float]:
        """Return pass@1 by teacher forcing, and greedy accuracy, with these weights; a missing tensor is an error."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(tensors[name])
        probability, num_greedy = 0.0, 0
        for rows in self._groups.values():
            prompts, answers = (torch.tensor(each) for each in zip(*rows, strict=True))
            inputs = torch.cat([prompts, answers[:, :-1]], dim=1)
            logits = self._model(input_ids=inputs, logits_to_keep=answers.shape[1]).logits
            logprobs = (logits / self._temperature).log_softmax(dim=-1).gather(2, answers[:, :, None])[:, :, 0]
            probability += float(logprobs.double().sum(dim=1).exp().sum())
            num_greedy += int((logits.argmax(dim=-1) == answers).all(dim=1).sum())
        return probability / self._num_prompts, num_greedy / self._num_prompts


def reached(curve: Iterable[tuple[float, float]], target: float) -> float | None:
    """Return when a curve of (seconds, accuracy) first reaches a target; None: never.

    Between two points it is a line, so that the interval of publications does not decide it.
    """
    before: tuple[float, float] | None = None
    for at, accuracy in curve:
        if accuracy >= target:
            if before is None:
                return at
            return before[0] + (target - before[1]) / (accuracy - before[1]) * (at - before[0])
        before = (at, accuracy)
    return None


def _step_times(path: Path) -> tuple[dict[int, float], float]:
    """Return step -> seconds from the start of training to its end, and when it started."""
    records = records_of(path.parent)
    if sum(record["kind"] == "start" for record in records) != 1:
        raise ConfigError(f"{path}: the trainer was started more than once, so its clock has gaps")
    steps = [record for record in records if record["kind"] == "step"]
    started_at_s = steps[0]["at_s"] - steps[0]["metrics"]["train_s"]
    return {r["step"]: r["metrics"]["train_s"] for r in steps}, started_at_s
