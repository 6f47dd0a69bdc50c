"""Weight versions: how small and fast deltas are, and how soon searchers have a version, beside whole versions.

    python benchmarks/weights.py [--json FILE] [--sections codec publish fleet pause]

A small transformer is pretrained, and trained on rewards by AdamW at three learning rates (some minutes, once: the
states stay in build/weights-bench). Sizes are of its versions 1 and 10 steps apart. Speeds and publications are of a
larger state: copies of the tensors, stacked, the rows and columns of each in another order. Speeds are per second of
CPU time of one thread. Publications go through a real S3 server over loopback, with the product's own writer and
reader. The pause is that of an engine with a random model. Every result is compared, bit by bit or by its digests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services" / "searcher")]

import torch  # noqa: E402

from benchmarks.weights_bench import formats, transfer  # noqa: E402
from benchmarks.weights_bench.pause import SIZES, measure_pause  # noqa: E402
from benchmarks.weights_bench.states import States, kept_states, tiled  # noqa: E402
from benchmarks.weights_bench.training import Schedule  # noqa: E402

LEARNING_RATES = (1e-6, 3e-6, 1e-5)
RATE = 3e-6
"""Of the publications, and of the targets."""
SECTIONS = ("codec", "publish", "fleet", "pause")
TARGETS = (
    # learning rate, steps apart, what, at least (sizes: times smaller; speeds: MB/s)
    (RATE, 1, "times smaller than full", 45.0),
    (RATE, 1, "times smaller than index+value", 4.0),
    (RATE, 1, "share of the floor", 1 / 1.5),
    (RATE, 10, "times smaller than full", 12.0),
    (RATE, 1, "encode MB/s", 1_000.0),
    (RATE, 1, "decode MB/s", 2_000.0),
)


def codec(states: States, least_parameters: int, num_rounds: int) -> dict[str, Any]:
    """Sizes and speeds for every learning rate and distance, and speeds of digests."""
    rows, digests = [], {}
    for rate, by_distance in states.items():
        old = by_distance[0]
        for distance, new in list(by_distance.items())[1:]:
            old_large, new_large = tiled(old, new, least_parameters, seed=0)
            rows.append(
                {
                    "learning_rate": rate,
                    "steps_apart": distance,
                    "bytes": formats.sizes(old, new),
                    "mb_per_s": formats.speeds(old_large, new_large, num_rounds),
                }
            )
            digests = digests or formats.digest_speeds(old_large, num_rounds)
    return {"rows": rows, "digest_mb_per_s": digests}


def judged(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for every target."""
    found = []
    for rate, distance, what, bound in TARGETS:
        for row in rows:
            if (row["learning_rate"], row["steps_apart"]) == (rate, distance):
                size, speed = row["bytes"], row["mb_per_s"]["tba"]
                value = {
                    "times smaller than full": size["full"] / size["tba"],
                    "times smaller than index+value": size["index+value"] / size["tba"],
                    "share of the floor": size["floor"] / size["tba"],
                    "encode MB/s": speed["encode"],
                    "decode MB/s": speed["decode"],
                }[what]
                verdict = "met" if value >= bound else "MISSED"
                found.append(f"lr {rate:g}, {distance} apart: {what} {value:.3g}, target {bound:.3g}: {verdict}")
    return found


def report(document: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    lines: list[str] = []
    if "codec" in document:
        lines += _codec_tables(document["codec"])
    if "publish" in document:
        lines += [
            "",
            "| one trainer, one searcher | publish s | download s | until ready s | stored MB | downloaded MB |",
            "|---|---|---|---|---|---|",
        ]
        for kind, row in document["publish"].items():
            seconds = " | ".join(f"{row[name]:.1f}" for name in ("publish_s", "download_s", "ready_s"))
            lines.append(f"| {kind} | {seconds} | {_mb(row['stored_bytes'])} | {_mb(row['downloaded_bytes'])} |")
    if "fleet" in document:
        lines += [
            "",
            "| searchers | kind | publish s | first ready s | all ready s | MB each | MB from the store |",
            f"|{'---|' * 7}",
        ]
        for kind, row in document["fleet"].items():
            seconds = " | ".join(f"{row[name]:.1f}" for name in ("publish_s", "first_s", "all_s"))
            sizes = " | ".join(_mb(row[name]) for name in ("bytes_per_searcher", "store_bytes"))
            lines.append(f"| {row['num_searchers']} | {kind} | {seconds} | {sizes} |")
    if "pause" in document:
        lines += _pause_table(document["pause"])
    return "\n".join(lines)


def _codec_tables(result: dict[str, Any]) -> list[str]:
    lines = [
        "| lr | steps apart | changed | by one step | index+value | xor+zstd | **tba** | floor | tba / floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        size = row["bytes"]
        cells = [f"{size['full'] / size[name]:.1f}" for name in ("index+value", "xor+zstd", "tba", "floor")]
        cells[2] = f"**{cells[2]}**"
        lines.append(
            f"| {row['learning_rate']:g} | {row['steps_apart']} | {size['changed_share']:.2%} | "
            f"{size['single_step_share']:.0%} | {' | '.join(cells)} | {size['tba'] / size['floor']:.2f} |"
        )
    lines += [
        "",
        "| lr | steps apart | encode: index+value | xor+zstd | **tba** | decode: index+value | xor+zstd | **tba** |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            f"{row['mb_per_s'][name][what]:,.0f}"
            for what in ("encode", "decode")
            for name in ("index+value", "xor+zstd", "tba")
        ]
        lines.append(f"| {row['learning_rate']:g} | {row['steps_apart']} | {' | '.join(cells)} |")
    digests = ", ".join(f"{name} {rate:,.0f}" for name, rate in result["digest_mb_per_s"].items())
    return [*lines, "", f"Digests, MB/s: {digests}."]


def _pause_table(rows: list[dict[str, Any]]) -> list[str]:
    names = ("bare_copy_s", "stage_s", "staged_load_s", "staged_digest_s", "staged_canary_s", "cold_load_s")
    lines = [
        "",
        "| engine | bare copy s | beside: stage s | pause: load s | digest s | canary s | load unstaged s | "
        "load and digest / bare copy | unstaged |",
        f"|{'---|' * 9}",
    ]
    for row in rows:
        ratios = f"**{row['staged_ratio']:.2f}** | {row['cold_ratio']:.2f}"
        lines.append(
            f"| {row['engine']}, {row['size']} | {' | '.join(f'{row[name]:.2f}' for name in names)} | {ratios} |"
        )
    return lines


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the sections that the arguments name."""
    schedule = Schedule(num_pretrain=args.pretrain, num_before=args.before, distances=args.distances)
    states = kept_states(args.states, args.learning_rates, schedule, args.seed)
    rate = RATE if RATE in states else args.learning_rates[0]
    old, new = states[rate][0], states[rate][args.distances[0]]
    document: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": f"{os.cpu_count()} CPUs",
        "load_average": os.getloadavg(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {name: str(value) for name, value in vars(args).items() if name != "json"},
    }
    if "codec" in args.sections:
        document["codec"] = codec(states, args.parameters, args.rounds)
    if {"publish", "fleet"} & set(args.sections):
        with transfer.s3_store() as store:
            if "publish" in args.sections:
                large = tiled(old, new, args.parameters, seed=0)
                document["publish"] = transfer.publish_to_ready(store, *large)
            if "fleet" in args.sections:
                large = tiled(old, new, args.fleet_parameters, seed=0)
                document["fleet"] = transfer.fleet(store, *large, args.searchers)
    if "pause" in args.sections:
        engines = ("embedded", "vllm") if importlib.util.find_spec("vllm") else ("embedded",)
        document["pause"] = [measure_pause(engine, size=args.pause_size, rounds=args.rounds) for engine in engines]
        if wrong := [row["engine"] for row in document["pause"] if not row["exact"]]:
            raise SystemExit(f"after a load these engines hold other weights: {wrong}")
    return document


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path)
    found.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    found.add_argument("--learning-rates", type=float, nargs="+", default=list(LEARNING_RATES))
    found.add_argument("--distances", type=int, nargs="+", default=[1, 10], help="steps between two versions")
    found.add_argument("--parameters", type=int, default=500_000_000, help="least size of the large state")
    found.add_argument("--fleet-parameters", type=int, default=20_000_000)
    found.add_argument("--searchers", type=int, default=64)
    found.add_argument("--pause-size", choices=tuple(SIZES), default="0.5B")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--pretrain", type=int, default=300, help="steps on text")
    found.add_argument("--before", type=int, default=40, help="steps on rewards before the first version")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--states", type=Path, default=ROOT / "build" / "weights-bench", help="trained states stay here")
    return found


def main() -> None:
    """Measure, print tables and targets, and write everything to `--json`."""
    args = parser().parse_args()
    torch.set_num_threads(1)
    document = measure(args)
    print(report(document))
    if "codec" in document:
        print("", *judged(document["codec"]["rows"]), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
