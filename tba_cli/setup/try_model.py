"""Try the starting model before anything starts, in a program of the searcher."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba_cli.child_processes import run_program


def try_model(recipe: Recipe) -> dict[str, Any] | None:
    """Return what was checked of the starting model; None where it cannot be, or need not."""
    found = [importlib.util.find_spec(name) for name in ("tba_searcher", "torch")]
    if recipe.searcher.engine == "simulated" or not all(spec and spec.submodule_search_locations for spec in found):
        return None
    with tempfile.TemporaryDirectory(prefix="tba-model-") as place:
        file = Path(place) / "recipe.json"
        file.write_text(recipe.model_dump_json(), encoding="utf-8")
        return json.loads(run_program("tba_searcher.engines.model_check", ["--config", str(file)]))
