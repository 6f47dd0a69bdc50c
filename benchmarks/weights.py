"""Weight versions: how fast deltas are, and how soon a searcher has a version, beside whole versions.

    python benchmarks/weights.py [--json FILE] [--sections codec publish pause]

The weights are random, and one in 44 changes from a version to the next, as a step of policy gradient has it. Speeds
are per second of CPU time of one thread. Publications go through a real S3 server over loopback, with the product's own
writer and reader. The pause is that of an engine with a random model. Every result is compared, bit by bit or by its
digests.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services" / "searcher")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.report import Target, judged, write_document  # noqa: E402
from benchmarks.weights_bench import transfer  # noqa: E402
from benchmarks.weights_bench.pause import SIZES, measure_pause  # noqa: E402
from benchmarks.weights_bench.states import State, made_states  # noqa: E402
from tba.weights.delta import apply_tensor, encode_tensor  # noqa: E402

SECTIONS = ("codec", "publish", "pause")
TARGETS = (
    Target("encode a delta", "encode_mb_per_s", 1_000, unit="MB/s"),
    Target("decode a delta", "decode_mb_per_s", 2_000, unit="MB/s"),
    Target("a version is larger than its delta", "times_smaller", 45, unit="times"),
)


def codec(old: State, new: State, num_rounds: int) -> dict[str, float]:
    """Return MB of tensors per second of CPU time, the copy of the base included, medians of rounds; and the size.

    Raises:
        SystemExit: a delta does not give the same bits back.
    """
    pairs = [(bits.reshape(-1).view(np.uint8), new[name].reshape(-1).view(np.uint8)) for name, bits in old.items()]
    outs = [np.empty_like(base) for base, _ in pairs]
    encode_s, decode_s, num_bytes = list[float](), list[float](), 0
    for _ in range(num_rounds):
        start = time.process_time()
        encoded = [encode_tensor(base, wanted, "BF16") for base, wanted in pairs]
        middle = time.process_time()
        for code, (base, _), out in zip(encoded, pairs, outs, strict=True):
            if code is None:
                out[:] = base
            else:
                apply_tensor(code, base, out, "BF16")
        decode_s.append(time.process_time() - middle)
        encode_s.append(middle - start)
        num_bytes = sum(len(code) for code in encoded if code is not None)
        if not all(np.array_equal(wanted, out) for (_, wanted), out in zip(pairs, outs, strict=True)):
            raise SystemExit("a delta gives other bits back")
    full = sum(wanted.nbytes for _, wanted in pairs)
    return {
        "encode_mb_per_s": full / 1e6 / statistics.median(encode_s),
        "decode_mb_per_s": full / 1e6 / statistics.median(decode_s),
        "times_smaller": full / num_bytes,
    }


def report(document: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    lines = judged(document["codec"], TARGETS)[0] if "codec" in document else []
    if "publish" in document:
        lines += [
            "",
            "| one trainer, one searcher | publish s | download s | until ready s | stored MB | downloaded MB |",
            "|---|---|---|---|---|---|",
        ]
        for kind, row in document["publish"].items():
            seconds = " | ".join(f"{row[name]:.1f}" for name in ("publish_s", "download_s", "ready_s"))
            sizes = " | ".join(f"{row[name] / 1e6:,.1f}" for name in ("stored_bytes", "downloaded_bytes"))
            lines.append(f"| {kind} | {seconds} | {sizes} |")
    if "pause" in document:
        lines += _pause_table(document["pause"])
    return "\n".join(lines)


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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the sections that the arguments name."""
    document: dict[str, Any] = {}
    if "codec" in args.sections:
        document["codec"] = codec(*made_states(args.parameters), args.rounds)
    if "publish" in args.sections:
        with transfer.s3_store() as store:
            document["publish"] = transfer.publish_to_ready(store, *made_states(args.parameters))
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
    found.add_argument("--parameters", type=int, default=500_000_000, help="size of the state")
    found.add_argument("--pause-size", choices=tuple(SIZES), default="0.5B")
    found.add_argument("--rounds", type=int, default=3)
    return found


def main() -> None:
    """Measure, print tables and targets, and write everything to `--json`."""
    args = parser().parse_args()
    torch.set_num_threads(1)
    document = measure(args)
    print(report(document))
    write_document(args, document)


if __name__ == "__main__":
    main()
