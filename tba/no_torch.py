"""Let transformers read configs and tokenizers without torch, whose import takes longer than all the rest."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec


def hide_torch() -> None:
    """Make torch look uninstalled in this process, by patching importlib; for programs that make no tensor."""
    find_spec = importlib.util.find_spec

    def without_torch(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find_spec(name, package)

    importlib.util.find_spec = without_torch
