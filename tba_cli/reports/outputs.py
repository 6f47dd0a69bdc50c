"""The outputs of a finished run: history.json, summary.json, the exported model, and the last lines."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from tba.api import RunSummary, TokenTotals
from tba.fields import escape_controls
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba_cli.console import known
from tba_cli.reports.history import History
from tba_cli.reports.summary import summarise
from tba_cli.run_folder import RunFolder, view_hint


def write_outputs(folder: RunFolder, history: History) -> dict[str, Any]:
    """Write history.json, then summary.json, whose presence means that the run is finished; return the summary."""
    # before anything is written: a defect here must not leave a run that looks finished
    summary = summarise(history)
    folder.write_json(folder.history_path, history.model_dump(mode="json"))
    folder.write_json(folder.summary_path, summary)
    return summary


def download_export(store: ObjectStore, *, run: str, folder: RunFolder) -> int:
    """Copy the exported Hugging Face folder from the store to model/; return the number of files."""
    prefix = f"runs/{run}/export/"
    keys = store.list(prefix)
    if not keys:
        return 0
    # model/ appears only when it is whole
    half = folder.path / "model.part"
    shutil.rmtree(half, ignore_errors=True)
    for key in keys:
        target = half / key.removeprefix(prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(key, target)
    shutil.rmtree(folder.model_path, ignore_errors=True)
    half.rename(folder.model_path)
    return len(keys)


def result_lines(summary: Mapping[str, Any], folder: RunFolder) -> list[str]:
    """Return the last lines of `tba run`: its results, and where the files are."""
    num_prompts = summary.get("num_heldout_prompts")
    on = "" if num_prompts is None else f" on {num_prompts} held-out prompts"
    if reason := summary.get("not_evaluated"):
        lines = [f"not evaluated: {reason}; `tba run --fork` or a run of the exported model with searchers does it"]
    else:
        lines = [
            f"pass@1 sampled: {known(summary['start_accuracy'])} -> {known(summary['final_accuracy'])}{on}",
            f"pass@1 greedy:  {known(summary['start_greedy'])} -> {known(summary['final_greedy'])}{on}",
        ]
        accuracies = summary["start_accuracy"], summary["final_accuracy"]
        rewards = summary["start_mean_reward"], summary["final_mean_reward"]
        # of rewards with grades the share of successes alone hides what was learned
        if rewards != (None, None) and rewards != accuracies:
            lines.insert(0, f"mean reward:    {known(rewards[0])} -> {known(rewards[1])}{on}")
    if num_unknown := summary.get("num_unknown_scores"):
        lines.append(f"left out of the last evaluation: {num_unknown} scores that are unknown")
    if num_failed := summary.get("rollouts_failed"):
        lines.append(escape_controls(failures_line(num_failed, [it["example"] for it in summary["failed_reasons"]])))
    if summary.get("best_version") is not None:
        lines.append(f"best version:  {summary['best_version']} ({summary['best_metric']} {summary['best_value']:.3f})")
    train_s, wait_share = summary["train_s"], summary["trainer_wait_share"]
    if train_s is not None:
        waited = "" if wait_share is None else f", of which the trainer waited {100 * wait_share:.1f} %"
        # a fork counts on from the step of its version, which another run has made
        first = PolicyVersion.parse(summary["forked_from"]).step if summary["forked_from"] else 0
        begun = f" from step {first} on" if first else ""
        lines.append(f"{summary['steps'] - first} steps{begun} in {train_s:.0f} s of training{waited}")
    if summary["tokens"]:
        lines.append(TokenTotals.model_validate(summary["tokens"]).line())
    if summary["steps"] < summary.get("num_steps", 0) and summary["state_reason"]:
        lines.append(f"ended early:   {summary['state_reason']}")
    lines.extend(f"warning: ledger: {violation}" for violation in summary["ledger_violations"][:5])
    if (said := summary.get("summary")) is not None and said["state"] != "ended":  # the lines above say why
        lines.append(escape_controls(RunSummary.model_validate(said).line))
    lines.append(f"summary: {folder.summary_path}")
    if folder.model_path.exists():
        lines.append(f"model:   {folder.model_path}")
    lines.append(f"logs:    {folder.logs_path}")
    lines.append(f"look:    {view_hint(folder)}")
    return lines


def failures_line(num_failed: int, reasons: Sequence[str]) -> str:
    """Return a line with the number of rollouts whose scoring failed, and the first of the reasons."""
    why = f": {reasons[0].removeprefix('exception: ')}" if reasons else ""
    return f"{num_failed:,} {'score' if num_failed == 1 else 'scores'} failed{why}"
