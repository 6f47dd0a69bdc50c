"""Optional packages of trackers."""

from __future__ import annotations

from importlib.util import find_spec

from tba.errors import ConfigError


def require(package: str, *, setting: str) -> None:
    """Refuse a setting whose package is missing; nothing is imported.

    Raises:
        ConfigError: with the command that installs it.
    """
    try:
        is_there = find_spec(package) is not None
    except ValueError:
        is_there = False
    if not is_there:
        raise ConfigError(
            f"{setting} needs the package {package}, which is not installed: pip install -e "
            f"'./services/trainer[{package}]'"
        )
