"""`tba set`: change live settings of a run, or show what holds, what was changed, and when that took effect."""

from __future__ import annotations

import argparse
from typing import Any

from tba.api import SettingsInfo, SettingsRequest
from tba.cli.target import open_client
from tba.config import LIVE_NAMES, parse_live
from tba.config.recipe import toml_value
from tba.errors import ConfigError
from tba.local.setting_changes import AS_RECIPE, change_lines, value_text, whole_settings
from tba.plain_text import shown


def set_command(args: argparse.Namespace) -> int:
    """Change settings, or show them."""
    args.run, document = _split(args)
    settings = parse_live(document) if document else None
    client = open_client(args)
    try:
        if settings is None:
            info = whole_settings(client)
        else:
            info = client.change_settings(SettingsRequest(settings=settings, reason=args.reason))
    finally:
        client.close()
    print(info.model_dump_json(indent=2) if args.json else "\n".join(map(shown, settings_lines(info))))
    return 0


def settings_lines(info: SettingsInfo) -> list[str]:
    """What holds now, one setting per line, and the changes."""
    lines = []
    for name in LIVE_NAMES:
        live, recipe = getattr(info.settings, name), getattr(info.recipe, name)
        said = AS_RECIPE if live is None else f"{value_text(live)} ({AS_RECIPE}: {value_text(recipe)})"
        lines.append(f"{name}: {said}, now {info.now[name]:g}")
    return lines + change_lines(info.changes)


def _split(args: argparse.Namespace) -> tuple[str | None, dict[str, Any]]:
    """The run that was named, if any, and the settings.

    Raises:
        ConfigError: two runs, a run beside --url or --run-dir, or a setting given twice.
    """
    runs = [item for item in args.items if "=" not in item]
    if len(runs) > 1 or (runs and (args.url or args.run_dir)):
        raise ConfigError(f"{runs[-1]!r} is neither KEY=VALUE nor the only name of a run; write settings as beta=0.1")
    document: dict[str, Any] = {}
    for item in args.items:
        name, sep, text = item.partition("=")
        name = name.strip()
        if name in document:
            raise ConfigError(f"{name!r} is given twice, the second time as {item!r}; give every setting once")
        if sep:
            document[name] = None if text.strip() == AS_RECIPE else toml_value(text)
    return runs[0] if runs else None, document
