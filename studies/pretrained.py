"""A pretrained model: tba beside TRL's GRPOTrainer on the same cores, from the same start to the same reward.

    python studies/pretrained.py run [--side trl tba] [--learning-rates ...] [--schedules ...] [--seeds ...]
    python studies/pretrained.py report         the tables

Both train SmolLM2-135M-Instruct on the questions of recipes/smollm2.toml: float32 weights under bfloat16 autocast, 32
rollouts a step, the same temperature, lengths and rule of reward. tba has the recipe's settings, but for prompts in
epochs as TRL has them. TRL comes from pip, pinned, into build/trl-venv. Both may use all cores. What else differs is
the design of each: TRL's batch is of the newest weights and its rewards too, tba's is two or three steps old. TRL
generates with the float32 weights under autocast, tba with a bfloat16 copy. TRL clips gradients at norm 1.

The reward is the mean of the last WINDOW batches; it reaches the target when the step that trains on them ends. The
clock runs from the begin of TRL's first step, and from the moment when tba's searcher has weights in its engine: starts
of processes and loading count for neither. The tables have them too. Seed 100 is for tuning. Steps are what counts
there: other work on the machine does not change them for TRL. Seconds of the other seeds need a quiet machine. A
finished run is one JSON line; a run that has a line is not made again, whatever the code is meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("buffer", "reward", "searcher", "trainer"))]

import psutil  # noqa: E402

from studies.data_file import append_line, read_lines  # noqa: E402
from studies.markdown import markdown  # noqa: E402
from studies.whole_runs import records_of, run_module  # noqa: E402
from tba.config import Recipe, load_recipe  # noqa: E402
from tba_cli.prompts.reader import prompts_of  # noqa: E402

Side = Literal["trl", "tba"]
SIDES: tuple[Side, ...] = ("trl", "tba")
RECIPE, DATA, VENV = ROOT / "recipes/smollm2.toml", ROOT / "docs/pretrained/trl.jsonl", ROOT / "build/trl-venv"
TUNING_SEEDS, SEEDS = (100,), (0, 1, 2)
TARGETS, WINDOW = (0.4, 0.5), 5
NUM_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of one side."""

    side: Side
    learning_rate: float
    schedule: str
    """`constant`, or `linear` to 0 at step NUM_STEPS."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came out, step by step."""

    cell: Cell
    start_s: float
    """From the start of the command to the begin of the clock."""
    peak_bytes: int
    """Memory of all processes of the side at once. For TRL's one process it is the peak, for tba the largest sample."""
    steps: list[dict[str, float]]
    """`seconds` of the clock at its end, `reward`, `num_tokens` and `num_rollouts` of its batch."""

    def reached(self, target: float) -> dict[str, float] | None:
        """Return the step that reached the target; None: none did."""
        for end in range(WINDOW, len(self.steps) + 1):
            if statistics.mean(step["reward"] for step in self.steps[end - WINDOW : end]) >= target:
                return self.steps[end - 1]
        return None

    def step_s(self, num_steps: int) -> float:
        """Return the seconds of the first steps, each, but for the first one, which tba's clock begins before."""
        return (self.steps[num_steps - 1]["seconds"] - self.steps[0]["seconds"]) / (num_steps - 1)

    def answer_tokens(self, num_steps: int) -> float:
        """Return the mean tokens of a response in the first steps."""
        first = self.steps[:num_steps]
        return sum(step["num_tokens"] for step in first) / sum(step["num_rollouts"] for step in first)


def main() -> None:
    """Run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--side", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[2e-5, 4e-5, 8e-5])
    parser.add_argument("--schedules", choices=("constant", "linear"), nargs="+", default=["constant"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*TUNING_SEEDS])
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines; with another file all is run again")
    args = parser.parse_args()
    # as Ctrl-C does: its processes end with it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.chdir(ROOT)  # the recipe names models/ relative to it
    if args.what == "run":
        grid = list(product(args.seeds, args.learning_rates, args.schedules))
        for number, (seed, rate, schedule) in enumerate(grid):
            # in turn, so that a slow hour of the machine meets all
            for side in args.side if number % 2 == 0 else args.side[::-1]:
                _run_missing(Cell(side=side, learning_rate=rate, schedule=schedule, seed=seed), args.data)
    print("\n\n".join(tables(read_results(args.data))))


def read_results(path: Path) -> dict[Cell, Result]:
    """Return the results of a data file by cell."""
    found: dict[Cell, Result] = {}
    for line in read_lines(path):
        cell = Cell(**line["cell"])
        found[cell] = Result(cell=cell, **{name: line[name] for name in ("start_s", "peak_bytes", "steps")})
    return found


def _run_missing(cell: Cell, data: Path) -> None:
    if cell in read_results(data):
        return
    result = _run_trl(cell) if cell.side == "trl" else _run_tba(cell)
    append_line(data, asdict(result))
    reached = ", ".join(f"{target} at step {_at(result, target, 'step')}" for target in TARGETS)
    print(f"{cell}: {reached}, {result.step_s(len(result.steps)):.1f} s a step", file=sys.stderr, flush=True)


def recipe_of(cell: Cell) -> tuple[Recipe, list[str]]:
    """Return the recipe of a cell, and the `--set` values that make it of recipes/smollm2.toml."""
    ends = "" if cell.schedule == "constant" else f", final = 0.0, steps = {NUM_STEPS}"
    rate = f'{{ kind = "{cell.schedule}", value = {cell.learning_rate}{ends} }}'
    sets = [
        f"run.seed={cell.seed}",
        f"trainer.num_steps={NUM_STEPS}",
        f"trainer.learning_rate={rate}",
        f"trainer.checkpoint_interval={10 * NUM_STEPS}",
        "trainer.export=false",
        "data.selection=epochs",
        f"eval.every_steps={10 * NUM_STEPS}",
        "eval.num_prompts=1",
        "eval.num_prompts_final=1",
    ]
    return load_recipe(RECIPE, sets=sets), sets


def _run_tba(cell: Cell) -> Result:
    _, sets = recipe_of(cell)
    folder = ROOT / "build" / "pretrained"
    folder.mkdir(parents=True, exist_ok=True)
    words = ["tba_cli.main", "run", str(RECIPE), "--fresh", "--quiet", "--run-name", "beside-trl"]
    words += [word for item in [*sets, f'local.runs_dir="{folder}"'] for word in ("--set", item)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:5]), "OMP_NUM_THREADS": str(os.cpu_count())}
    memory, started_s = Memory(), time.time()
    code, _ = run_module(words, folder=ROOT, log=folder / "tba.log", environ=environ, begin=memory.watch)
    if code:
        raise SystemExit(f"error: tba ended with {code}: {(folder / 'tba.log').read_text()[-2000:]}")
    run = folder / "beside-trl"
    begin_s = engine_ready_s(run / "logs")
    steps = [record for record in records_of(run) if record["kind"] == "step"]
    return Result(
        cell=cell,
        start_s=round(begin_s - started_s, 1),
        peak_bytes=memory.peak_bytes,
        steps=[
            {
                "step": record["step"],
                "seconds": round(record["at_s"] - begin_s, 2),
                "reward": record["metrics"]["reward_mean"],
                "num_tokens": record["metrics"]["num_tokens"],
                "num_rollouts": record["metrics"]["num_rollouts"],
                "age": record["metrics"]["policy_age_mean"],
            }
            for record in steps
        ],
    )


class Memory:
    """The largest memory of a process with all its children, sampled every ten seconds."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Sample until the process ends."""
        threading.Thread(target=self._sample, args=(process,), daemon=True).start()

    def _sample(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            try:
                root = psutil.Process(process.pid)
                each = (one.memory_full_info().pss for one in (root, *root.children(recursive=True)))
                self.peak_bytes = max(self.peak_bytes, sum(each))
            except psutil.Error:
                pass  # one has just ended
            time.sleep(10.0)  # a look at all pages of all processes takes time from them


def engine_ready_s(logs: Path) -> float:
    """Return when the first searcher had its weights in its engine: its first lease follows at once."""
    lines = (line for path in logs.glob("searcher-*.log") for line in path.read_text().splitlines())
    found = [datetime.fromisoformat(line.partition(" ")[0]).timestamp() for line in lines if " engine ready " in line]
    if not found:
        raise SystemExit(f"error: no searcher in {logs} says when its engine was ready")
    return min(found)


def _run_trl(cell: Cell) -> Result:
    _make_venv()
    started_s = time.time()
    recipe, _ = recipe_of(cell)
    folder = ROOT / "build" / "pretrained" / "trl"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts = [{"text": each.text, "data": each.data} for each in prompts_of(recipe) if each.split == "train"]
    sampling, (scorer,) = recipe.sampling, recipe.reward.tasks["chain_sum"].scorers
    settings = {
        "prompts": prompts,
        "model": recipe.model.path,
        "folder": str(folder),
        "num_threads": os.cpu_count(),
        "seed": cell.seed,
        "dtype": "float32",
        "bf16": True,
        "num_steps": NUM_STEPS,
        "micro_batch": 8,  # as fast as 32 in less memory, or faster
        "num_rollouts": sampling.prompts_per_batch * sampling.group_size,
        "group_size": sampling.group_size,
        "max_response_tokens": recipe.searcher.max_response_tokens,
        "temperature": recipe.model.policy_temperature,
        "learning_rate": cell.learning_rate,
        "schedule": cell.schedule,
        "rule": {name: getattr(scorer, name) for name in ("extract", "partial")},
        "window": WINDOW,
        "target": TARGETS[-1],
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services/reward")])}
    environ["OMP_WAIT_POLICY"] = "passive"  # as tba's processes: threads that spin lose most beside any other work
    words = [str(VENV / "bin/python"), "-m", "studies.pretrained_trl_program", str(folder / "settings.json")]
    with (folder / "log").open("w") as log:
        code = subprocess.run(words, cwd=ROOT, env=environ, stdout=log, stderr=log).returncode
    if code:
        raise SystemExit(f"error: TRL ended with {code}: {(folder / 'log').read_text()[-2000:]}")
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return Result(
        cell=cell,
        start_s=round(steps[0].pop("began_at_s") - started_s, 1),
        peak_bytes=max(step.pop("peak_bytes") for step in steps),
        steps=steps,
    )


def _make_venv() -> None:
    """Install TRL beside the product's pinned packages, once."""
    installed = VENV / ".installed"
    if installed.exists():
        return
    print(f"installing TRL into {VENV} (a few minutes, once)", file=sys.stderr, flush=True)
    pip = [str(VENV / "bin/pip"), "install", "-q", "-c", str(ROOT / "deploy/constraints/main.txt")]
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    # first and pinned: by itself, pip would take the build for GPUs
    subprocess.run([*pip, "torch"], check=True)
    local = ["-e", str(ROOT), "-e", f"{ROOT / 'services/reward'}"]  # the rewards are the product's
    subprocess.run([*pip, "trl==1.16.0", "reasoning-gym", *local], check=True)
    installed.touch()


def tables(results: dict[Cell, Result]) -> Iterator[str]:
    """Yield the tables as Markdown."""
    cells = sorted(results, key=lambda cell: (cell.seed not in TUNING_SEEDS, cell.learning_rate, cell.seed, cell.side))
    rows = [
        [
            *(cell.side, f"{cell.learning_rate:g} {cell.schedule}", str(cell.seed), f"{len(results[cell].steps)}"),
            *(_at(results[cell], target, unit) for target in TARGETS for unit in ("step", "seconds")),
            f"{statistics.mean(step['reward'] for step in results[cell].steps[-WINDOW:]):.2f}",
        ]
        for cell in cells
    ]
    targets = [f"{unit} to {target}" for target in TARGETS for unit in ("steps", "seconds")]
    yield "Every run; the last column is the mean reward of its last batches:"
    yield markdown(["side", "learning rate", "seed", "steps", *targets, "last"], rows)
    for rate in sorted({cell.learning_rate for cell in cells}):
        of_rate = {(cell.side, cell.seed): results[cell] for cell in cells if cell.learning_rate == rate}
        pairs = [{side: of_rate[side, seed] for side in SIDES if (side, seed) in of_rate} for seed in SEEDS]
        if pairs := [pair for pair in pairs if len(pair) == len(SIDES)]:
            yield f"At {rate:g}; ratios are TRL's by tba's, above 1 tba is ahead. Per step: the steps of both."
            yield _comparison(pairs)


def _comparison(pairs: list[dict[Side, Result]]) -> str:
    """Return the table of runs of both sides with the same seeds."""
    # TRL's runs end at the target, and tba's answers are shorter later
    shared = {id(result): min(len(each.steps) for each in pair.values()) for pair in pairs for result in pair.values()}
    names: list[tuple[str, Any]] = [
        (f"{unit} to {target}", lambda result, t=target, u=unit: (found := result.reached(t)) and found[u])
        for target in TARGETS
        for unit in ("seconds", "step")
    ]
    names += [
        ("seconds per step", lambda result: result.step_s(shared[id(result)])),
        ("tokens of a response", lambda result: result.answer_tokens(shared[id(result)])),
        ("seconds before the clock", lambda result: result.start_s),
        ("memory, GiB", lambda result: result.peak_bytes / 2**30),
    ]
    columns = [f"{side}, seed {result.cell.seed}" for pair in pairs for side, result in pair.items()]
    rows = [[name, *_figures(pairs, figure)] for name, figure in names]
    return markdown(["figure", *columns, "ratio, median (range)"], rows)


def _figures(pairs: list[dict[Side, Result]], figure: Any) -> Iterator[str]:
    values = [[figure(pair[side]) for side in SIDES] for pair in pairs]
    yield from ("never" if value is None else f"{value:.3g}" for row in values for value in row)
    ratios = [float("inf") if trl is None else trl / tba for trl, tba in values if tba is not None]
    if len(ratios) < len(pairs):
        yield "-"
    else:
        yield f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"


def _at(result: Result, target: float, unit: str) -> str:
    found = result.reached(target)
    return "-" if found is None else f"{found[unit]:.0f}"


if __name__ == "__main__":
    main()
