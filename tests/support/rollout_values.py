"""Builds rollouts from arrays, because the fields of a rollout hold raw bytes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec

from tba.wire import Rollout, float32_bytes, single_turn

Value = TypeVar("Value")
TURN = ("prompt_tokens", "response_tokens", "finish_reason")
"""What `single_turn` makes the sequences of."""


def array_bytes(fields: dict[str, Any], before: Rollout | None = None) -> dict[str, Any]:
    """Return fields of a rollout of one turn, with arrays encoded as its fields hold them.

    Args:
        before: has the parts of the turn that `fields` does not name.
    """
    found = {name: value for name, value in fields.items() if name not in (*TURN, "sampler_logprobs")}
    if any(name in fields for name in TURN):
        found["sequences"] = single_turn(*(fields[name] if name in fields else getattr(before, name) for name in TURN))
    if "sampler_logprobs" in fields:
        found["logprob_bytes"] = float32_bytes(fields["sampler_logprobs"])
    return found


def replace(value: Value, **changes: Any) -> Value:
    """Return a copy of a dataclass, rollout, group or batch with changed fields; arrays are allowed for rollouts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **changes)
    return msgspec.structs.replace(value, **array_bytes(changes, value if isinstance(value, Rollout) else None))  # pyright: ignore[reportArgumentType]
