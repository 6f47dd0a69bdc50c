"""The weight manifest: the immutable JSON document that makes one weight version exist.

It is written last, create-only, and holds the digest of every tensor. A version has one of three forms, or both of the
first two. They are `full` (safetensors files), `delta` (changes against an older version) and `adapter` (a LoRA adapter
for the starting model). All give the same tensors. A searcher makes two checks before it pushes with the version. It
compares `params_sha256` with the parameters in its engine. And it compares its canary log-probs with those that the
trainer computed from the published tensors in the published dtype.

The digest of a tensor is xxh3-128 of its raw little-endian bytes. It protects from accidents: flipped bits, truncated
objects, tensors of another version. It does not protect from those who may write to the store.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from tba.errors import MalformedError, StoreError
from tba.fields import first_problem
from tba.store.file import check_key
from tba.versions import PolicyVersion

MAX_MANIFEST_BYTES = 16 * 1024 * 1024
"""Limit of a manifest, which is parsed as a whole: about 150 bytes for each of 110,000 tensors."""
MAX_CANARY_TOKENS = 64
"""Most tokens of prompt and response of a canary together; every engine can take this many."""
MAX_CANARY_TOLERANCE = 2.0
"""Largest tolerance, in nats: beyond it an engine computes another model, whatever tolerance a manifest has."""
MAX_DELTAS = 256
"""Most deltas between a version and the nearest version that is stored whole."""
MAX_TENSOR_BYTES = 2**42
DTYPE_BYTES = dict.fromkeys(["F64", "I64", "U64"], 8)
DTYPE_BYTES |= dict.fromkeys(["F32", "I32", "U32"], 4) | dict.fromkeys(["BF16", "F16", "I16", "U16"], 2)
DTYPE_BYTES |= dict.fromkeys(["F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"], 1)
"""Dtype, as safetensors writes it -> bytes of an element."""
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
"""File systems take 255 characters; the rest is for the prefixes that downloads add."""
Item = TypeVar("Item")
Many = Annotated[list[Item], FailFast()]
"""A list whose validation stops at the first wrong item, because there may be millions."""
_MAX_FIELDS = 40


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StoredObject(_Strict):
    """One object of the store: its name inside the version or snapshot, its store key, size and digest."""

    name: FileName
    key: str = Field(min_length=1, max_length=1024)
    size_bytes: int = Field(ge=0)
    sha256: Sha256


class TensorEntry(_Strict):
    """One tensor of the version, and the name of its safetensors file."""

    name: str = Field(min_length=1, max_length=512)
    dtype: str
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]] = Field(max_length=8)
    file: FileName
    digest: Xxh3

    @model_validator(mode="after")
    def _check(self) -> TensorEntry:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}")
        if self.size_bytes > MAX_TENSOR_BYTES:
            raise ValueError(f"tensor {self.name!r} of shape {self.shape} has more than {MAX_TENSOR_BYTES} bytes")
        return self

    @property
    def size_bytes(self) -> int:
        """Size of the raw tensor in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class TensorFile(_Strict):
    """A safetensors file of a version that is stored whole. It is verified by the digests of its tensors."""

    name: FileName
    key: str = Field(min_length=1, max_length=1024)
    size_bytes: int = Field(ge=8)
    sha256: None = None
    """Always null in schema 2."""


class DeltaObject(_Strict):
    """A safetensors file with encoded changes of tensors, or with an adapter."""

    name: FileName
    key: str = Field(min_length=1, max_length=1024)
    size_bytes: int = Field(ge=8)
    digest: Xxh3
    """xxh3-128 of the file."""


class Delta(_Strict):
    """The changes that turn the tensors of version `base` into those of this version (`tba.weights.delta`)."""

    base: str
    num_to_full: int = Field(ge=1, le=MAX_DELTAS)
    """Number of deltas to apply after the nearest version that is stored whole, this one included."""
    objects: Many[DeltaObject]


class Adapter(_Strict):
    """The LoRA adapter that turns the tensors of version `base` into those of this version (`tba.weights.adapter`)."""

    base: str
    """Version of the starting model, which is stored whole."""
    rank: int = Field(ge=1, le=2**16)
    alpha: int = Field(ge=1, le=2**31)
    fan_in_fan_out: bool
    """Whether the model's weights are [in, out], as in GPT-2; otherwise they are [out, in]."""
    stored: DeltaObject
    """The safetensors file of the adapter, with tensor names as peft writes them."""

    @property
    def scale(self) -> float:
        """Factor on the product of the adapter's two matrices."""
        return self.alpha / self.rank


class Canary(_Strict):
    """A fixed sequence, and the trainer's log-probs [R] of its response tokens at temperature 1, in nats."""

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
    """The manifest of one weight version."""

    schema_version: Literal[2] = Field(default=2, alias="schema")
    run: str
    version: str
    parent: str | None
    dtype: Literal["float32", "bfloat16", "float16"]
    tensors: Many[TensorEntry]
    full: Many[TensorFile] = Field(default_factory=list)
    """Files of the version if it is stored whole; empty: it is stored as a delta or an adapter only."""
    delta: Delta | None = None
    adapter: Adapter | None = None
    """The adapter, for a version that a trainer with LoRA published as an adapter."""
    files: Many[StoredObject]
    model_config_sha256: Sha256
    tokenizer_sha256: Sha256
    params_sha256: Sha256
    """`table_sha256` of the tensors."""
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

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        objects = [*self.files, *self.full, *self.changes]
        if len({each.name for each in objects}) != len(objects):
            raise ValueError("two objects have the same name")
        for each in objects:
            # what is read must be of this run: a manifest must not make a searcher fetch secrets beside it
            if not each.key.startswith(f"runs/{self.run}/"):
                raise ValueError(f"the key {each.key!r} is not below runs/{self.run}/")
            try:
                check_key(each.key)
            except StoreError as error:
                raise ValueError(str(error)) from None
        if self.delta is None and self.adapter is None and not self.full:
            raise ValueError("the version is stored neither whole, nor as a delta, nor as an adapter")
        # strictly older bases: a chain of deltas cannot have a cycle
        if self.delta is not None and not PolicyVersion.parse(self.delta.base) < self.policy_version:
            raise ValueError(f"the base {self.delta.base} of the delta is not older than version {self.version}")
        if self.adapter is not None and not PolicyVersion.parse(self.adapter.base) < self.policy_version:
            raise ValueError(f"the base {self.adapter.base} of the adapter is not older than version {self.version}")
        if len({each.name for each in self.tensors}) != len(self.tensors):
            raise ValueError("two tensors have the same name")
        files = {each.file for each in self.tensors}
        # a file without tensors is one of a model without parameters
        if self.full and not files <= {each.name for each in self.full}:
            raise ValueError(f"tensors belong to files that are not stored: {sorted(files)[:3]}")
        if not files.isdisjoint(each.name for each in self.files):
            raise ValueError("tensors belong to a file of the config or the tokenizer")
        entries = ((each.name, each.dtype, each.shape, each.digest) for each in self.tensors)
        if table_sha256(entries) != self.params_sha256:
            raise ValueError("params_sha256 is not the sha256 of the table of tensors")
        return self

    @property
    def policy_version(self) -> PolicyVersion:
        """The version, parsed."""
        return PolicyVersion.parse(self.version)

    @property
    def is_full(self) -> bool:
        """Whether the version is stored whole; it may be stored as a delta too."""
        return bool(self.full)

    @property
    def base(self) -> PolicyVersion | None:
        """The base version of the delta; None: there is no delta."""
        return None if self.delta is None else PolicyVersion.parse(self.delta.base)

    @property
    def needed_base(self) -> PolicyVersion | None:
        """The base version without which this version cannot be assembled; None: it is stored whole."""
        if self.is_full:
            return None
        return self.base if self.adapter is None else PolicyVersion.parse(self.adapter.base)

    @property
    def changes(self) -> list[DeltaObject]:
        """The store objects of the delta and of the adapter."""
        return [
            *(() if self.delta is None else self.delta.objects),
            *(() if self.adapter is None else (self.adapter.stored,)),
        ]

    @property
    def full_bytes(self) -> int:
        """Bytes of all tensors, whether the version is stored whole or not."""
        return sum(each.size_bytes for each in self.tensors)

    @property
    def delta_bytes(self) -> int:
        """Bytes of the delta in the store; 0 if there is no delta."""
        return 0 if self.delta is None else sum(each.size_bytes for each in self.delta.objects)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapter in the store; 0 if there is no adapter."""
        return 0 if self.adapter is None else self.adapter.stored.size_bytes


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode as JSON, keys in a fixed order.

    Raises:
        MalformedError: the result is larger than MAX_MANIFEST_BYTES, because the model has too many tensors.
    """
    without = {"adapter"} if manifest.adapter is None else None
    data = manifest.model_dump_json(by_alias=True, exclude=without).encode() + b"\n"
    if len(data) > MAX_MANIFEST_BYTES:
        raise MalformedError(
            f"weight manifest: {len(data)} bytes for {len(manifest.tensors)} tensors, the limit is "
            f"{MAX_MANIFEST_BYTES}: hold the parts of a layer in one tensor, as transformers does with experts"
        )
    return data


def decode_manifest(data: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        MalformedError: it is too large, or a field is wrong; the message names the first one.
    """
    # a store may be written by others: parse no more than a manifest can have
    if len(data) > MAX_MANIFEST_BYTES:
        raise MalformedError(f"weight manifest: {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
    try:
        document = from_json(data)  # the models refuse infinity and NaN, and name the field
        _check_num_fields(document)
        return Manifest.model_validate(document)
    except ValidationError as error:
        raise MalformedError(f"weight manifest: {first_problem(error)}") from None
    except ValueError as error:
        raise MalformedError(f"weight manifest: {error}") from None


def _check_num_fields(value: Any) -> None:
    """Refuse objects with many more fields than a manifest has: each unknown one would get an error of its own."""
    if isinstance(value, dict):
        if len(value) > _MAX_FIELDS:
            raise ValueError(f"an object with {len(value)} fields")
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            if isinstance(each, (dict, list)):  # a union would be slower, and there may be millions
                _check_num_fields(each)


def sha256_hex(data: bytes) -> str:
    """Return the sha256 as lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def table_sha256(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Return the sha256 of a table of tensors, given as (name, dtype, shape, digest) in any order."""
    # trainer and engines hold the parameters in different orders;
    # with name, dtype and shape: equal bytes under another name are another model
    lines = (f"{name}|{dtype}|{'x'.join(map(str, shape))}|{digest}\n" for name, dtype, shape, digest in sorted(entries))
    return sha256_hex("".join(lines).encode())
