"""The age of rollouts on a pretrained model: objectives at several lags, on the task of recipes/smollm2.toml.

    python studies/pretrained_age.py run | report [--methods NAME ...] [--lags N ...] [--steps N] [--max-minutes N]

Step t has rollouts of the policy after step max(0, t - 1 - lag). The product's engine samples them, its rule scores
them, and its Learner and guards train on them, in one process with one thread. Prompts come in shuffled epochs, while
visits of the recipe prefer some of them. `tba data prepare recipes/smollm2.toml` makes the model.
No cell begins after `--max-minutes`. A finished cell is one JSON line with its commit. A cell that has a line is not
run again, whatever its commit. Delete the lines that a change of the code, or of `--eval-samples`, makes wrong.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count, product, repeat
from pathlib import Path
from statistics import fmean as mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("buffer", "reward", "searcher", "trainer"))]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tba_reward.scorer import Item  # noqa: E402
from tba_reward.scorers.reasoning_gym import score  # noqa: E402
from tba_searcher.engines.engine import Completion, EngineSettings, Request  # noqa: E402
from tba_searcher.engines.tokenizer import TextCodec  # noqa: E402
from tba_searcher.engines.torch.engine import EmbeddedEngine  # noqa: E402
from tba_trainer.learner.guards import GuardState, check_step, usual_grad_norm  # noqa: E402
from tba_trainer.learner.learner import Learner  # noqa: E402
from tba_trainer.model.parameters import published_tensors  # noqa: E402
from tba_trainer.model.policy import TORCH_DTYPES, load_policy  # noqa: E402

from studies.data_file import append_line, read_lines  # noqa: E402
from studies.markdown import markdown  # noqa: E402
from tba.api import Prompt  # noqa: E402
from tba.config import Recipe, load_recipe  # noqa: E402
from tba.config.objective import PRESETS  # noqa: E402
from tba.versions import PolicyVersion  # noqa: E402
from tba.wire import Batch, Group, Rollout, Sampling, float32_bytes, single_turn  # noqa: E402
from tba_cli.prompts.reader import prompts_of  # noqa: E402

RECIPE, START = ROOT / "recipes" / "smollm2.toml", ROOT / "models" / "smollm2-135m"
RUN, LINEAGE, EVAL_EVERY_STEPS = "study", 1, 10
GIVE_UP_BELOW = 0.25  # a run is over when its sampled accuracy falls below this share of the start's
RULE = {"extract": "last_number", "partial": False}
COMMON = {"run": RUN, "ref_logprob": None, "reward_status": "scored", "reward_reason": None, "reward_version": RUN}
COMMON |= {"searcher_id": RUN, "visit_id": RUN, "started_at_s": 0.0, "finished_at_s": 0.0}
MEASURED = (
    "reward_mean",
    "ess",
    "grad_norm",
    "grad_clipped",
    "clipped_share",
    "frac_reward_zero_std",
    "policy_age_mean",
)
MEASURED += ("log_ratio_token_mean", "logprob_gap_on_policy")
"""Metrics of the learner in a curve: means over the steps since the last point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Everything that decides the result of a run."""

    method: str
    lag: int
    learning_rate: float
    beta: float
    seed: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A finished cell; accuracy is 0 from where a run ended early."""

    cell: Cell
    result: Mapping[str, Any]

    def area(self) -> float:
        """Return the mean of sampled accuracy over the run, by the trapezoid rule."""
        steps, values = self._sampled()
        return float(np.trapezoid(values, steps)) / (steps[-1] or 1)

    def final(self) -> float:
        """Return the mean sampled accuracy of the last two points."""
        return mean(self._sampled()[1][-2:])

    def mean_of(self, name: str) -> float | None:
        """Return the mean of a column over the second half of the run; None: unknown throughout."""
        values = self.result["curve"][name]
        known = [value for value in values[len(values) // 2 :] if value is not None]
        return mean(known) if known else None

    def _sampled(self) -> tuple[list[int], list[float]]:
        curve = self.result["curve"]
        if self.result["num_steps_done"] == self.cell.num_steps:
            return curve["step"], curve["sampled"]
        return [*curve["step"], curve["step"][-1] + 1, self.cell.num_steps], [*curve["sampled"], 0.0, 0.0]


def read_cells(path: Path) -> dict[Cell, Line]:
    """Return the finished cells; the last line of a cell counts."""
    return {(cell := Cell(**line["cell"])): Line(cell=cell, result=line["result"]) for line in read_lines(path)}


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """Return the cells without a line, seed after seed, and in each lag after lag; a preset without a KL has beta 0."""
    done = read_cells(args.json)
    cells = [
        Cell(method=method, lag=lag, learning_rate=rate, beta=beta, seed=seed, num_steps=args.steps)
        for seed, lag, method, rate in product(args.seeds, args.lags, args.methods, args.learning_rates)
        for beta in (args.betas if args.betas and PRESETS[method].beta else [PRESETS[method].beta])
    ]
    return [cell for cell in cells if cell not in done]


def recipe_of(cell: Cell, start: Path) -> Recipe:
    """Return the product's recipe of a cell: the file's, but for these keys."""
    sets = [f"run.seed={cell.seed}", f"model.path={start}", f"objective.preset={cell.method}"]
    sets += [f"objective.beta={cell.beta!r}", f"trainer.num_steps={cell.num_steps}"]
    sets.append(f"trainer.learning_rate={{ value = {cell.learning_rate!r}, warmup_steps = 3 }}")
    return load_recipe(RECIPE, sets=sets, environ={})


def rows_of(step: int, num_rows: int, count: int, seed: int) -> list[int]:
    """Return the `count` prompts of a step: shuffled epochs, each without a rest that is too little for a step."""
    epoch, place = divmod(step - 1, num_rows // count)
    order = np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()
    return order[place * count : (place + 1) * count]


class Sampler:
    """The product's engine, with the tokens and end-of-sequence ids of its searchers."""

    def __init__(self, recipe: Recipe) -> None:
        start, searcher = Path(recipe.model.path), recipe.searcher
        sizes = {name: getattr(searcher, name) for name in ("num_slots", "max_prompt_tokens", "max_response_tokens")}
        settings = EngineSettings(**sizes, seed=recipe.run.seed, dtype=recipe.model.dtype)
        self._codec, self._engine = TextCodec(start), EmbeddedEngine(start, PolicyVersion(LINEAGE, 0), settings)
        eos_ids = tuple(sorted({*self._engine.default_eos_ids, *self._codec.eos_ids}))
        self._limits = {"max_response_tokens": searcher.max_response_tokens, "eos_ids": eos_ids}
        self._ids = map(str, count())  # never twice: the reference remembers its log-probs by rollout id

    def rollouts(self, weights: Path, step: int, asked: Sequence[tuple[Prompt, Sampling]]) -> list[Rollout]:
        """Return scored answers of the policy after `step` steps, in the order of what is asked."""
        self._engine.load_weights([weights], PolicyVersion(LINEAGE, step))
        tokens = [self._codec.prompt_tokens(prompt) for prompt, _ in asked]
        for ids, (_, each) in zip(tokens, asked, strict=True):
            self._engine.submit(Request(request_id=next(self._ids), prompt_tokens=ids, sampling=each, **self._limits))
        done: list[Completion] = []
        while self._engine.num_active + self._engine.num_waiting:
            done += self._engine.step()
        done.sort(key=lambda each: int(each.request_id))
        rollouts = list[Rollout]()
        for (prompt, _), ids, each, text in zip(asked, tokens, done, self._codec.decode_responses(done), strict=True):
            reward = score(Item(prompt=prompt.text, response=text, data=prompt.data), RULE)
            fields = {**COMMON, "rollout_id": int(each.request_id).to_bytes(16, "big"), "reward": reward}
            fields |= {"task": prompt.task, "prompt_id": prompt.prompt_id}
            fields |= {"sequences": single_turn(ids, each.response_tokens, each.finish_reason), "response_text": text}
            fields |= {"logprob_bytes": float32_bytes(each.sampler_logprobs), "sampling": each.sampling}
            rollouts.append(Rollout(**fields, version_spans=each.version_spans))
        return rollouts


def point_of(step: int, rollouts: Sequence[Rollout], recent: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a point of the curve: of evaluated rollouts, and of the metrics of the steps since the last point."""
    sampled = [each for each in rollouts if each.sampling.temperature]
    columns = {
        "sampled": [each.reward for each in sampled],
        "greedy": [each.reward for each in rollouts if not each.sampling.temperature],
        "num_tokens": [len(each.response_tokens) for each in sampled],
        **{name: [each[name] for each in recent if each.get(name) is not None] for name in MEASURED},
    }
    return {"step": step} | {name: float(f"{mean(of):.4g}") if of else None for name, of in columns.items()}


def train(cell: Cell, prompts: Sequence[Prompt], start: Path, eval_samples: int) -> dict[str, Any]:
    """Run a cell; `num_steps_done` is less than asked for if a guard stopped it, or if the policy was lost."""
    torch.set_num_threads(1)
    recipe, num_steps, lag, began_s = recipe_of(cell, start), cell.num_steps, cell.lag, time.process_time()
    temperature, size, guards = recipe.model.policy_temperature, recipe.sampling.group_size, GuardState()
    train_on, heldout = ([each for each in prompts if each.split == split] for split in ("train", "heldout"))
    seeds = range(eval_samples * len(heldout))  # the same random numbers at every point
    questions = [(heldout[seed // eval_samples], Sampling.of(temperature, seed=seed)) for seed in seeds]
    greedy = [(prompt, Sampling.of(0.0)) for prompt in heldout]  # at the first and last step only: they cost a third
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    learner, sampler = Learner(model, recipe, np.random.default_rng(cell.seed)), Sampler(recipe)
    points, metrics = list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        path = f"{name}/{{}}.safetensors".format
        for step in range(num_steps + 1):
            if step:
                made = max(0, step - 1 - lag)
                rows = rows_of(step, len(train_on), recipe.sampling.prompts_per_batch, cell.seed)
                asked = [(train_on[row], Sampling.of(temperature)) for row in rows for _ in range(size)]
                rollouts = sampler.rollouts(Path(path(made)), made, asked)
                parts = [tuple(rollouts[first : first + size]) for first in range(0, len(rollouts), size)]
                groups = [Group(part[0].prompt_id, source="recent", fallback=False, rollouts=part) for part in parts]
                batch = Batch(batch_id=f"{step}", deadline_s=0.0, seed=0, log_position=0, groups=tuple(groups))
                ages, usual = [step - 1 - made] * len(rollouts), usual_grad_norm(recipe.trainer.guards, guards)
                found = learner.gradients(batch, step=step, policy_ages=ages, usual_grad_norm=usual)
                guards = (action := check_step(recipe.trainer.guards, guards, found)).state
                if action.skip is not None:
                    break
                learner.apply(step=step, lineage=LINEAGE)
                metrics.append(found)
            save_file(dict(published_tensors(model, TORCH_DTYPES[recipe.model.dtype])), path(step), {"format": "pt"})
            Path(path(step - lag - 1)).unlink(missing_ok=True)
            if step % EVAL_EVERY_STEPS == 0 or step == num_steps:
                recent = metrics[points[-1]["step"] if points else 0 :]
                asked = questions + (greedy if step in (0, num_steps) else [])
                points.append(point_of(step, sampler.rollouts(Path(path(step)), step, asked), recent))
                if points[-1]["sampled"] < GIVE_UP_BELOW * points[0]["sampled"]:
                    break
    done = {"num_steps_done": len(metrics), "eval_samples": eval_samples}
    curve = {name: [point[name] for point in points] for name in points[0]}
    return {**done, "curve": curve, "cpu_s": round(time.process_time() - began_s, 2)}


def run_cell(cell: Cell, prompts: Sequence[Prompt], args: argparse.Namespace, until_s: float) -> None:
    """Run a cell and append its line, unless it is too late to begin."""
    if time.time() >= until_s:
        return
    result = train(cell, prompts, START, args.eval_samples)
    append_line(args.json, {"cell": asdict(cell), "result": result})
    print(f"{cell}: area {Line(cell=cell, result=result).area():.3f}, {result['cpu_s']} CPU s", flush=True)


def report(lines: Iterable[Line]) -> str:
    """Return a table for each measure, with a row for each method and setting and a column for each lag."""
    arms: dict[tuple[str, ...], dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        cell = line.cell
        arms[cell.method, f"{cell.learning_rate:.3g} / {cell.beta:.3g}", f"{cell.num_steps}"][cell.lag].append(line)
    lags = sorted({lag for by_lag in arms.values() for lag in by_lag})
    head = ("Method", "Learning rate / beta", "Steps", *(f"Lag {lag}" for lag in lags))
    tables = ["Mean (each seed), share of what lag 0 has with the same seeds."]
    for title, value_of in MEASURES.items():
        rows = [(*arm, *(text_of(value_of, found[lag], found[0]) for lag in lags)) for arm, found in arms.items()]
        tables.append(f"{title}:\n\n{markdown(head, rows)}")
    return "\n\n".join(tables)


def text_of(value_of: Callable[[Line], float | None], lines: Sequence[Line], on_policy: Sequence[Line]) -> str:
    """Return the mean of a lag, the value of each seed, and the share of lag 0 over the seeds that both have."""
    here, there = ({x.cell.seed: v for x in each if (v := value_of(x)) is not None} for each in (lines, on_policy))
    both = here.keys() & there.keys()
    below = sum(there[seed] for seed in both)
    share = f", {sum(here[seed] for seed in both) / below:.0%}" if below else ""
    each = ", ".join(f"{here[seed]:.3f}" for seed in sorted(here))
    return f"{mean(list(here.values())):.3f} ({each}){share}" if here else "-"


MEASURES: dict[str, Callable[[Line], float | None]] = {
    "Area under the curve of sampled accuracy": Line.area,
    "Sampled accuracy of the last two points": Line.final,
    "Effective sample size, second half of the run": lambda line: line.mean_of("ess"),
}


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    several = {"methods": ("tb_positive", "tba_prime", "grpo"), "lags": (0, 16, 4), "seeds": (0, 1)}
    for name, default in [*several.items(), ("learning-rates", (3e-5,)), ("betas", ())]:
        parser.add_argument(f"--{name}", type=type((*default, 0.0)[0]), nargs="+", default=default)
    for name, default in {"steps": 40, "workers": 1, "eval-samples": 2, "max-minutes": math.inf}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "pretrained" / "age.jsonl")
    args = parser.parse_args()
    until_s = time.time() + 60 * args.max_minutes
    if args.command == "report":
        print(report(read_cells(args.json).values()))
    elif cells := cells_of(args):
        prompts = prompts_of(recipe_of(cells[0], START))
        with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(run_cell, cells, repeat(prompts), repeat(args), repeat(until_s)))
        print(f"cells without a line: {len(cells_of(args))}")


if __name__ == "__main__":
    main()
