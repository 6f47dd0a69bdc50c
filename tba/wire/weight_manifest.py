"""The weight manifest: the immutable JSON document that makes one weight version exist.

It is written last, create-only, and names every object with size and sha256. A searcher makes two checks before it may
push with the version: `params_sha256` over the parameters that its engine holds after loading, and the canary log-probs
that the trainer computed from the published tensors in the published dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tba.errors import MalformedError
from tba.versions import PolicyVersion

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""A manifest has about 300 bytes per object; a model of 10,000 files fits."""
MAX_CANARY_TOKENS = 64
"""Prompt and response together; every engine can take so many."""
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StoredObject(_Strict):
    """One object of the version: `name` inside the version, `key` in the store."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    key: str = Field(min_length=1, max_length=1024)
    size_bytes: int = Field(ge=0)
    sha256: Sha256


class Canary(_Strict):
    """A fixed sequence and the log-probs [R] of its response tokens at temperature 1."""

    prompt_tokens: list[TokenId] = Field(min_length=1, max_length=MAX_CANARY_TOKENS)
    response_tokens: list[TokenId] = Field(min_length=1, max_length=MAX_CANARY_TOKENS)
    logprobs: list[float] = Field(max_length=MAX_CANARY_TOKENS)
    tolerance: float = Field(gt=0)

    @model_validator(mode="after")
    def _check(self) -> Canary:
        num_tokens = len(self.prompt_tokens) + len(self.response_tokens)
        if num_tokens > MAX_CANARY_TOKENS:
            raise ValueError(f"a canary of {num_tokens} tokens; at most {MAX_CANARY_TOKENS} are allowed")
        if len(self.logprobs) != len(self.response_tokens):
            raise ValueError(f"{len(self.logprobs)} log-probs for {len(self.response_tokens)} response tokens")
        return self


class Manifest(_Strict):
    """One weight version."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    run: str
    version: str
    parent: str | None
    kind: Literal["full"] = "full"
    dtype: Literal["float32", "bfloat16", "float16"]
    tensors: list[StoredObject]
    files: list[StoredObject]
    model_config_sha256: Sha256
    tokenizer_sha256: Sha256
    params_sha256: Sha256
    canary: Canary
    torch_version: str
    transformers_version: str
    created_at_s: float

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @field_validator("version", "parent")
    @classmethod
    def _is_version(cls, text: str | None) -> str | None:
        if text is not None:
            PolicyVersion.parse(text)
        return text

    @property
    def policy_version(self) -> PolicyVersion:
        """The version as a value."""
        return PolicyVersion.parse(self.version)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode as JSON, keys in a fixed order."""
    return manifest.model_dump_json(by_alias=True, indent=1).encode() + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        MalformedError: it is too large, or the first field that is wrong.
    """
    # a store may be written by others: parse no more than a manifest can have
    if len(data) > MAX_MANIFEST_BYTES:
        raise MalformedError(f"weight manifest: {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise MalformedError(f"weight manifest: {where}: {first['msg']}") from None


def sha256_hex(data: bytes) -> str:
    """Return the lower-case hex sha256."""
    return hashlib.sha256(data).hexdigest()


def params_digest(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes | memoryview]]) -> str:
    """Return the sha256 over named parameters, independent of their order.

    Args:
        tensors: name -> (dtype name, shape, raw little-endian bytes).
    """
    digest = hashlib.sha256()
    # trainer and engines hold the parameters in different orders
    for name in sorted(tensors):
        add_param(digest, name, *tensors[name])
    return digest.hexdigest()


def add_param(digest: hashlib._Hash, name: str, dtype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> None:
    """Add the next parameter to a `params_digest` that is computed step by step; names must come in sorted order."""
    # with name, dtype and shape: equal bytes under another name are another model
    digest.update(f"{name}|{dtype}|{'x'.join(map(str, shape))}|".encode())
    digest.update(raw)
