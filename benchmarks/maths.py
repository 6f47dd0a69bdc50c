"""Measure how far maths scoring agrees with readers and with math-verify's own tests.

    python benchmarks/maths.py [--json FILE] [--all]

Two lists (benchmarks/maths_bench/pairs.py): pairs made by hand, scored as recipes score (`extract = "boxed"`), and the
cases of math-verify's tests, scored with `extract = "anywhere"`, because many of them have no box. Prints a table per
list (docs/results.md has them) and every disagreement; `--all` also scores both lists with math-verify alone. Ends with
exit code 1 when the scorer's verdict on a pair is not the recorded one. Takes about 20 seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.maths_bench.pairs import Pair, hard_pairs, math_verify_cases, math_verify_verdict, scorer_verdict


def compare(pairs: list[Pair], judge: Callable[[Pair], str]) -> dict[str, Any]:
    """Agreement per class, and what differs."""
    classes: dict[str, dict[str, int]] = {}
    differing, unexpected = [], 0
    for pair in pairs:
        ours = judge(pair)
        counts = classes.setdefault(
            pair.kind, dict.fromkeys(("pairs", "agree", "too_kind", "too_strict", "unknown"), 0)
        )
        counts["pairs"] += 1
        counts["agree"] += ours == pair.verdict
        counts["too_kind"] += ours == "right" != pair.verdict
        counts["too_strict"] += ours == "wrong" != pair.verdict
        counts["unknown"] += ours == "unknown" != pair.verdict
        if ours != pair.verdict:
            differing.append({"class": pair.kind, "verdict": pair.verdict, "ours": ours, "gold": pair.gold[-100:],
                              "response": pair.response[-100:]})  # fmt: skip
        unexpected += ours != (pair.known or pair.verdict)
    total = {key: sum(counts[key] for counts in classes.values()) for key in next(iter(classes.values()))}
    return {"classes": classes, "total": total, "differing": differing, "num_unexpected": unexpected}


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| class | pairs | agree | too kind | too strict | no score |", "|---|---|---|---|---|---|"]
    for name, counts in [*result["classes"].items(), ("**all**", result["total"])]:
        share = counts["agree"] / counts["pairs"]
        rest = " | ".join(str(counts[key]) for key in ("too_kind", "too_strict", "unknown"))
        lines.append(f"| {name} | {counts['pairs']} | {counts['agree']} ({share:.1%}) | {rest} |")
    return "\n".join(lines)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here too")
    parser.add_argument("--all", action="store_true", help="also score both lists with math-verify alone")
    args = parser.parse_args()
    hard, theirs = hard_pairs(), math_verify_cases()
    results = {
        "hand-made pairs": compare(hard, lambda pair: scorer_verdict(pair, extract="boxed")),
        "math-verify's cases": compare(theirs, lambda pair: scorer_verdict(pair, extract="anywhere")),
    }
    num_unexpected = sum(result["num_unexpected"] for result in results.values())
    if args.all:
        results["hand-made pairs, math-verify alone"] = compare(
            hard, lambda pair: math_verify_verdict(pair, box_gold=True)
        )
        results["math-verify's cases, math-verify alone"] = compare(theirs, math_verify_verdict)
    for name, result in results.items():
        print(f"\n## {name}\n\n{table(result)}\n")
        for each in result["differing"]:
            print("  ", json.dumps(each, ensure_ascii=False))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if num_unexpected:
        print(f"{num_unexpected} verdicts are not the recorded ones", file=sys.stderr)
    return 1 if num_unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
