"""How far the log-probs of a canary are apart by rounding alone, and how far when an engine holds wrong weights.

    python benchmarks/canary.py run [--folder build/canary] [--canaries 200] [--models FOLDER ...]
    python benchmarks/canary.py report [--folder build/canary]      # or docs/canary, what was measured

`run` makes models (most are trained for a minute), takes those of `--models` too (Hugging Face folders in float32, such
as the starting models of the small recipes), and measures each in a process of its own; models that have a result in
the folder are left out. One thread. vLLM takes part where it is installed. `report` prints the tables from the results.
How tolerances follow from the trainer's own gap (`tba_trainer.checkpoints.canary`) is chosen from them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("searcher", "trainer"))]

import torch  # noqa: E402

from benchmarks.canary_bench.measure import measure_torch, measure_vllm  # noqa: E402
from benchmarks.canary_bench.models import KINDS, make_model  # noqa: E402
from benchmarks.canary_bench.tables import report_text  # noqa: E402

DTYPES = ["float32", "bfloat16", "float16"]


def measure_one(model: str, args: argparse.Namespace) -> None:
    """Measure one model in this process, and write its result."""
    torch.set_num_threads(1)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="canary-") as name:
        scratch = Path(name)
        if model in KINDS:
            folder, title = scratch / "model", model
            about = make_model(folder, KINDS[model], max_steps=args.max_train_steps)
        else:
            folder, title, about = Path(model), Path(model).name, {}
        found = measure_torch(
            title, folder, scratch, dtypes=DTYPES, num_canaries=args.canaries, num_signal=args.signal_canaries
        )
        if find_spec("vllm") is not None and not args.without_vllm:
            measure_vllm(found, dtypes=DTYPES, num_signal=args.signal_canaries)
    document = found.document() | {
        "model": about,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the end",
        "seconds": time.perf_counter() - start_s,
        "cpu_seconds": time.process_time() - start_cpu_s,
    }
    _result_path(args.folder, model).write_text(json.dumps(document) + "\n")


def run(args: argparse.Namespace) -> int:
    """Measure every model that has no result yet, each in a process of its own; vLLM changes the one it is in."""
    args.folder.mkdir(parents=True, exist_ok=True)
    for model in [*KINDS, *map(str, args.models)]:
        if (args.only and args.only not in model) or _result_path(args.folder, model).exists():
            continue
        print(f"{time.strftime('%H:%M:%S')} {model}", flush=True)
        options = ["--canaries", str(args.canaries), "--signal-canaries", str(args.signal_canaries)]
        if args.max_train_steps is not None:
            options += ["--max-train-steps", str(args.max_train_steps)]
        if args.without_vllm:
            options.append("--without-vllm")
        command = [sys.executable, __file__, "run", "--one", model, "--folder", str(args.folder), *options]
        if subprocess.run(command, check=False).returncode:
            print(f"{model}: failed", file=sys.stderr)
            return 1
    return 0


def _result_path(folder: Path, model: str) -> Path:
    name = model if model in KINDS else Path(model).name
    return folder / f"{name.replace(',', '').replace(' ', '-')}.json"


def main() -> int:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "canary", help="of the results")
    parser.add_argument("--models", type=Path, nargs="+", default=[], help="more models")
    parser.add_argument("--canaries", type=int, default=200, help="per model, for the noise")
    parser.add_argument("--signal-canaries", type=int, default=10, help="of them, per defect")
    parser.add_argument("--only", help="models whose name has this part")
    parser.add_argument("--max-train-steps", type=int, help="shorten the training")
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.action == "report":
        paths = sorted([*args.folder.glob("*.json"), *args.folder.glob("*.jsonl")])
        print(report_text([json.loads(line) for path in paths for line in path.read_text().splitlines()]))
        return 0
    if args.one is not None:
        measure_one(args.one, args)
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
