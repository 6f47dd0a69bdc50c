"""The live settings of a run as people read them: what was changed, by whom, and since which step."""

from __future__ import annotations

import html
from collections.abc import Sequence

from tba.api import SettingsAudit, SettingsInfo
from tba.api.settings import SettingEffect
from tba.clients import BufferClient
from tba.config import Schedule

AS_RECIPE = "recipe"
"""How a setting is called that is as the recipe says."""


def whole_settings(client: BufferClient) -> SettingsInfo:
    """What holds now, with every change."""
    info = client.settings()
    changes = list(info.changes)
    while info.next is not None:
        info = client.settings(after=info.next)
        changes += info.changes
    return info.model_copy(update={"changes": changes})


def value_text(value: Schedule | int | None) -> str:
    """A value in a few words."""
    if value is None:
        return AS_RECIPE
    if not isinstance(value, Schedule):
        return str(value)
    text = f"{value.value:g}"
    if value.kind != "constant":
        text = f"{value.kind} {text} to {value.final:g} over {value.steps} steps"
    return text + (f" after {value.warmup_steps} of warm-up" if value.warmup_steps else "")


def changed_text(info: SettingsInfo) -> str:
    """What is not as the recipe says, in one line; empty when all of it is."""
    return ", ".join(
        f"{name} {value_text(value)} (recipe: {value_text(getattr(info.recipe, name))})"
        for name, value in info.settings.changed().items()
    )


def change_lines(changes: Sequence[SettingsAudit]) -> list[str]:
    """A line for each change, and one below for each of its settings."""
    lines = []
    for audit in changes:
        what = ", ".join(
            f"{name} {value_text(change.old)} -> {value_text(change.new)}" for name, change in audit.changes.items()
        )
        reason = f" ({audit.reason})" if audit.reason else ""
        lines.append(f"revision {audit.revision}, by the {audit.role} after step {audit.step}: {what}{reason}")
        for name in audit.changes:
            lines.append(f"  {name}: {_effects_text([effect for effect in audit.effects if effect.name == name])}")
    return lines


def changes_section(info: SettingsInfo | None) -> str:
    """The part of the report that tells of changes; empty when there were none."""
    if info is None or not info.changes:
        return ""
    return f"<h2>Changed settings</h2>\n<pre>{html.escape(chr(10).join(change_lines(info.changes)))}</pre>\n"


def _effects_text(effects: Sequence[SettingEffect]) -> str:
    if not effects:
        return "not in effect so far"
    steps = [f"{e.lineage}-{e.step}" + (" (abandoned)" if e.abandoned else "") for e in effects]
    return f"in effect from step {', '.join(steps)} on"
