"""Measure how near past runs came to the alarms: replay the guards over saved histories (`runs/*/history.json`).

    python benchmarks/guards.py runs/*/history.json [--json FILE]

Per run: the largest gradient norm beside the median that the guard compares it with, the smallest effective sample
size, the largest |mean log-ratio per token|, and how often each alarm would have gone off with the thresholds of
`[trainer.guards]` (their defaults, or those of `--config recipe.toml`). Thresholds for a new kind of run: from here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tba_trainer.learner.guards import GuardState, check_step, norm_to_compare

from tba.api import LedgerEntry
from tba.config import load_recipe
from tba.config.trainer import GuardsSection
from tba_cli.reports.history import History


def replay(entries: list[LedgerEntry], guards: GuardsSection) -> dict[str, Any]:
    """Replay one history; return the extremes and the alarms that the guards would have raised."""
    state, alarms = GuardState(), dict[str, int]()
    spike, ess, drift = 0.0, 1.0, 0.0
    for entry in entries:
        metrics = dict(entry.metrics)
        if metrics.get("log_ratio_token_mean") is None:  # ledgers of older releases
            metrics["log_ratio_token_mean"] = _per_token(metrics)
        norm, usual = metrics.get("grad_norm"), norm_to_compare(guards, state, metrics)
        if norm is not None and usual is not None:
            spike = max(spike, norm / usual)
        ess = min(ess, metrics.get("ess") or 1.0)
        drift = max(drift, abs(metrics["log_ratio_token_mean"] or 0.0))
        result = check_step(guards, state, metrics if entry.skipped is None else None)
        state = result.state
        for alarm in result.alarms:
            alarms[alarm.name] = alarms.get(alarm.name, 0) + 1
    return {
        "num_steps": len(entries),
        "max_norm_over_median": round(spike, 2),
        "min_ess": round(ess, 3),
        "max_abs_log_ratio_token_mean": round(drift, 3),
        "alarms": alarms,
    }


def _per_token(metrics: dict[str, float | None]) -> float | None:
    total, num_rollouts, num_tokens = (metrics.get(n) for n in ("log_ratio_mean", "num_rollouts", "num_tokens"))
    return None if total is None or num_rollouts is None or not num_tokens else total * num_rollouts / num_tokens


def main() -> int:
    """Print a line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("histories", nargs="+", type=Path, help="history.json of runs")
    parser.add_argument("--config", type=Path, help="recipe whose [trainer.guards] to use; default: the defaults")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    guards = GuardsSection() if args.config is None else load_recipe(args.config).trainer.guards
    found = {}
    for path in args.histories:
        history = History.model_validate_json(path.read_text())
        lineages = sorted({entry.lineage for entry in history.batches})
        entries = [entry for lineage in lineages for entry in history.batches if entry.lineage == lineage]
        found[str(path)] = replay(entries, guards)
        print(path, json.dumps(found[str(path)]))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
