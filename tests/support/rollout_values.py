"""Builds rollouts from arrays, because the fields of a rollout hold raw bytes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec

from tba.wire import float32_bytes, int32_bytes

Value = TypeVar("Value")
FIELDS = {
    "prompt_tokens": ("prompt_bytes", int32_bytes),
    "response_tokens": ("response_bytes", int32_bytes),
    "sampler_logprobs": ("logprob_bytes", float32_bytes),
}


def array_bytes(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a rollout, with arrays encoded and renamed to the fields that hold their bytes."""
    encoders = {name: FIELDS.get(name, (name, lambda value: value)) for name in fields}
    return {encoders[name][0]: encoders[name][1](value) for name, value in fields.items()}


def replace(value: Value, **changes: Any) -> Value:
    """Return a copy of a dataclass, rollout, group or batch with changed fields; arrays are allowed for rollouts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **changes)
    return msgspec.structs.replace(value, **array_bytes(changes))  # pyright: ignore[reportArgumentType]
