"""docker-compose.yml as text and as data, without an engine: `${NAME:-default}` takes its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class Loader(yaml.SafeLoader):
    """Knows Compose's `!override`."""


def _override(loader: Loader, node: yaml.Node) -> Any:
    return loader.construct_mapping(node, deep=True) if isinstance(node, yaml.MappingNode) else None


Loader.add_constructor("!override", _override)


def interpolated(text: str, environ: dict[str, str]) -> str:
    """As Compose does it, for `${NAME}` and `${NAME:-default}`."""
    return _VARIABLE.sub(lambda found: environ.get(found[1]) or found[2] or "", text)


def compose(name: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """A Compose file of the repository's root."""
    text = interpolated((ROOT / name).read_text(), environ or {})
    return yaml.load(text, Loader)


def environment(service: dict[str, Any]) -> dict[str, str]:
    """The TBA_SECTION__KEY values of a service, but for those that come from the shell."""
    given = {key: value for key, value in service.get("environment", {}).items() if value is not None}
    return {key: str(value) for key, value in given.items() if re.match(r"TBA_\w+__\w+$", key)}
