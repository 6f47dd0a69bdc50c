"""The OpenAPI documents of the services, and the page that describes them to people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.buffer import make_recipe

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def documents() -> list[dict[str, Any]]:
    """Return the OpenAPI documents of buffer and reward service."""
    from tba_buffer.api.app import build_app as build_buffer
    from tba_reward.app import build_app as build_reward

    recipe = make_recipe()
    return [build_buffer(recipe, None).openapi(), build_reward(recipe, tokens=None).openapi()]


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    """Return (METHOD, path, operation) for every operation of both services."""
    return [
        (method.upper(), path, operation)
        for document in documents()
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
