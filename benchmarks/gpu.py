"""Is tba right on this device (smoke), and how fast and large is it (bench)?

    python benchmarks/gpu.py smoke [--device cuda|cpu] [--only NAME ...] [--json FILE] [--report FILE] [--minutes N]
    python benchmarks/gpu.py bench ...
    python benchmarks/gpu.py one NAME ...      # a check in this process, its output on the terminal

Every check calls the product's own functions, on models with the shapes of Hugging Face configs and random weights.
Without --device it takes the GPU, or the CPU where there is none: there sizes are tiny, and only what runs is proven.
Each check has its own process and deadline; what it found is written at once. The exit code is 1 if any did not pass.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask for cards must not open a context before a fork
ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), *(str(ROOT / "services" / name) for name in ("trainer", "searcher", "buffer", "reward"))]
sys.path[:0] = PATHS
# for the processes that checks start
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])

from benchmarks.gpu_bench.check import Bench, Findings  # noqa: E402
from benchmarks.gpu_bench.checks import CHECKS  # noqa: E402


def main() -> int:
    """Return the exit code."""
    width = max(len(check.name) for check in CHECKS) + 2
    listed = "\n".join(f"  {check.name:<{width}}{check.about} ({', '.join(check.kinds)})" for check in CHECKS)
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"checks:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["smoke", "bench", "one"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of `one`: the check")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is a card")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks, in the order of the list")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line for each check")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report as Markdown")
    parser.add_argument("--minutes", type=float, metavar="N", help="start no further check after N minutes")
    args = parser.parse_args()
    names = {check.name: check for check in CHECKS}
    for name in [*(args.only or ()), *(args.names if args.kind == "one" else ())]:
        if name not in names:
            parser.error(f"there is no check {name!r}; there are {', '.join(names)}")
    if len(args.names) != (args.kind == "one"):
        parser.error("`one` needs the name of a check, and smoke and bench none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="tba-gpu-", ignore_cleanup_errors=True) as folder:
        kind = "bench" if args.kind != "smoke" else "smoke"
        device: Literal["cuda", "cpu"] = args.device or _device()
        bench = Bench(device=device, kind=kind, folder=Path(folder))
        if args.kind == "one":
            return _one(args.names[0], bench)
        chosen = [check for check in CHECKS if kind in check.kinds and (not args.only or check.name in args.only)]
        return _all(chosen, bench, args)


def _device() -> Literal["cuda", "cpu"]:
    """Return cuda where a card is, without a CUDA context in this process."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    print("no GPU here: the checks run on the CPU, with tiny sizes", file=sys.stderr)
    return "cpu"


def _one(name: str, bench: Bench) -> int:
    from benchmarks.gpu_bench.runner import run_one

    found = Findings()
    code = run_one(next(check for check in CHECKS if check.name == name), bench, found)
    for key, value in found.values.items():
        print(f"{key:<48}{value}")
    for failure in found.failures:
        print(f"FAILED {failure}")
    return code or int(bool(found.failures))


def _all(chosen: list, bench: Bench, args: argparse.Namespace) -> int:
    from benchmarks.gpu_bench.runner import line_of, report_text, run_checks

    results = []
    for result in run_checks(chosen, bench, json_path=args.json, minutes=args.minutes):
        results.append(result)
        print(line_of(result), flush=True)
        if args.report:  # after each: a machine that goes away leaves a report
            title = f"gpu-{args.kind} on {bench.device}"
            args.report.write_text(
                report_text(results, title=title, command=" ".join(["benchmarks/gpu.py", args.kind]))
            )
    return int(any(result["status"] not in ("passed", "skipped") for result in results))


if __name__ == "__main__":
    sys.exit(main())
