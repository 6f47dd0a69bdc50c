"""`tba set`, `tba scale`, `tba rollback`: change live settings, the number of searchers, the weights; or show them."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

from tba.api import CheckpointList, RollbackRequest, RunInfo, ScaleRequest, SearchersInfo, SettingsInfo, SettingsRequest
from tba.config import LIVE_NAMES, parse_live
from tba.config.live_settings import AS_RECIPE, setting_text
from tba.config.recipe_file import parse_toml_value
from tba.errors import ConfigError
from tba.fields import MAX_STEP
from tba_cli.console import print_answer
from tba_cli.run_target import open_client

SOURCES = {"operator": "asked for by the operator", "recipe": "as the recipe says", "run-over": "the run is over"}


def set_command(args: argparse.Namespace) -> int:
    """Change live settings of a run, or show them."""
    runs = [item for item in args.items if "=" not in item]
    if len(runs) > 1 or (runs and (args.url or args.run_dir)):
        raise ConfigError(f"{runs[-1]!r} is neither KEY=VALUE nor the only name of a run; write settings as beta=0.1")
    args.run, document = runs[0] if runs else None, dict[str, Any]()
    for item in args.items:
        name, sep, text = item.partition("=")
        name = name.strip()
        if name in document:
            raise ConfigError(f"{name!r} is given twice, the second time as {item!r}; give every setting once")
        if sep:
            # None takes the change back, which is not the same as a value that equals the recipe now
            document[name] = None if text.strip() == AS_RECIPE else parse_toml_value(text)
    settings = parse_live(document) if document else None
    with closing(open_client(args)) as client:
        if settings is None:
            info = client.all_settings()
        else:
            info = client.change_settings(SettingsRequest(settings=settings, reason=args.reason))
    print_answer(info, settings_lines(info), as_json=args.json)
    return 0


def settings_lines(info: SettingsInfo) -> list[str]:
    """Return a line for each setting with its value now, and a line for each change."""
    lines = []
    for name in LIVE_NAMES:
        live, recipe = getattr(info.settings, name), getattr(info.recipe, name)
        source = AS_RECIPE if live is None else f"{setting_text(live)} ({AS_RECIPE}: {setting_text(recipe)})"
        lines.append(f"{name}: {source}, now {info.now[name]:g}")
    return lines + [audit.line() for audit in info.changes]


def scale_command(args: argparse.Namespace) -> int:
    """Change the number of searchers, or show it."""
    num = None
    if args.number not in (None, AS_RECIPE):
        # int() would take "1_0", " 4" and digits of other scripts
        if not args.number.isascii() or not args.number.isdigit():
            raise ConfigError(
                f"{args.number!r} is neither a number of searchers nor the word recipe; for example: tba scale 4"
            )
        num = int(args.number)
    with closing(open_client(args)) as client:
        if args.number is None:
            info = client.scaling()
            changes = list(info.changes)
            # the reply holds one page
            while info.next is not None:
                info = client.scaling(after=info.next)
                changes += info.changes
            info = info.model_copy(update={"changes": changes})
        else:
            info = client.scale(ScaleRequest(num_searchers=num, reason=args.reason))
    lines = [searchers_line(info.searchers)]
    for change in info.changes:
        old, new = (AS_RECIPE if num is None else str(num) for num in (change.old, change.new))
        reason = f" ({change.reason})" if change.reason else ""
        lines.append(
            f"revision {change.revision}, by the {change.role} after step {change.step}: {old} -> {new}{reason}"
        )
    print_answer(info, lines, as_json=args.json)
    return 0


def searchers_line(searchers: SearchersInfo) -> str:
    """Return how many searchers are desired and alive, in one line."""
    desired = "" if searchers.desired is None else f"{searchers.desired} desired ({SOURCES[str(searchers.source)]}), "
    note = f"; {searchers.note}" if searchers.note else ""
    return f"searchers: {desired}{searchers.alive} alive, scaled by {searchers.backend}{note}"


def rollback_command(args: argparse.Namespace) -> int:
    """Ask the run to roll back to a checkpoint, or list its checkpoints."""
    if args.step is None and args.reason is not None:
        raise ConfigError("--reason says why the run returns to --step N; add that, or leave --reason out")
    with closing(open_client(args)) as client:
        if args.step is None:
            found = CheckpointList(versions=client.checkpoints())
            shown = f"checkpoints, newest first: {', '.join(found.versions) or 'none so far'}"
        else:
            # the model would refuse it with a traceback
            if not 0 <= args.step <= MAX_STEP:
                raise ConfigError(f"step {args.step} is out of range; name one from 0 to {MAX_STEP}")
            found = client.rollback(RollbackRequest(step=args.step, reason=args.reason))
            shown = rollback_line(found) or f"run {found.run!r} has rolled back already: lineage {found.lineage}"
    print_answer(found, [shown], as_json=args.json)
    return 0


def rollback_line(info: RunInfo) -> str | None:
    """Return a line about the rollback that waits for the trainer; None if there is none."""
    if info.rollback is None:
        return None
    reason = f" ({info.rollback.reason})" if info.rollback.reason else ""
    paused = "; the run stays paused" if info.state == "paused" else ""
    return f"a rollback to {info.rollback.version} waits for the trainer{reason}{paused}"
