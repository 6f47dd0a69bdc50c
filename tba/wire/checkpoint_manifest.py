"""The checkpoint manifest: the JSON document that makes a checkpoint exist, and lists which object holds which rows.

Every process of the trainer writes the rows of tensors that it holds. Objects are named by their content, so equal
objects are stored once for all checkpoints.

The digest of an object is xxh3-128 of its bytes. It protects from accidents, not from those who may write to the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tba.errors import MalformedError
from tba.fields import first_problem
from tba.versions import PolicyVersion
from tba.wire.weight_manifest import FileName, Many, Sha256, Xxh3

MAX_CHECKPOINT_MANIFEST_BYTES = 256 * 1024 * 1024
"""A slice takes about 120 bytes: 2,000 tensors with their two moments, over 256 processes, take 180 MB."""
Size = Annotated[int, Field(ge=0, lt=2**40)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Slice(_Strict):
    """The rows [begin, end) of a tensor. A tensor without dimensions has one row."""

    begin: Size
    end: Size
    shape: list[Size] = Field(max_length=8)
    """Shape of the whole tensor."""

    @model_validator(mode="after")
    def _check(self) -> Slice:
        if not self.begin <= self.end <= self.num_rows:
            raise ValueError(f"rows {self.begin} to {self.end} of a tensor of shape {self.shape}")
        return self

    @property
    def num_rows(self) -> int:
        """Number of rows of the whole tensor."""
        return self.shape[0] if self.shape else 1


class CheckpointObject(_Strict):
    """A safetensors file in the store with slices of tensors of one section."""

    section: FileName
    lineage: int = Field(ge=0)
    """Lineage of the trainer that wrote the file."""
    digest: Xxh3
    size_bytes: int = Field(ge=8)
    slices: dict[Name, Slice]

    @property
    def name(self) -> str:
        """Last part of its store key (`object_name`)."""
        return object_name(self.lineage, self.digest)


class CheckpointManifest(_Strict):
    """The manifest of one checkpoint."""

    schema_version: Literal[2] = 2
    run: str
    version: str
    state_sha256: Sha256
    """sha256 of the checkpoint's state.json."""
    objects: Many[CheckpointObject]

    @field_validator("version")
    @classmethod
    def _is_version(cls, text: str) -> str:
        PolicyVersion.parse(text)
        return text

    @model_validator(mode="after")
    def _check(self) -> CheckpointManifest:
        for (section, name), slices in self.tensors().items():
            end, shape = 0, slices[0].shape
            for each in sorted(slices, key=lambda each: (each.begin, each.end)):
                if each.shape != shape:
                    raise ValueError(f"tensor {name!r} of section {section!r} has two shapes, {shape} and {each.shape}")
                if each.begin != end:
                    raise ValueError(
                        f"tensor {name!r} of section {section!r}: row {min(end, each.begin)} is not in it once"
                    )
                end = each.end
            if end != slices[0].num_rows:
                raise ValueError(f"tensor {name!r} of section {section!r} ends at row {end} of {slices[0].num_rows}")
        return self

    def tensors(self) -> Mapping[tuple[str, str], list[Slice]]:
        """Return (section, tensor name) -> the slices of the tensor, in the order of the objects."""
        found: dict[tuple[str, str], list[Slice]] = {}
        for each in self.objects:
            for name, piece in each.slices.items():
                found.setdefault((each.section, name), []).append(piece)
        return found


def decode_checkpoint_manifest(data: bytes, *, what: str) -> CheckpointManifest:
    """Parse a checkpoint manifest.

    Args:
        what: its store key, for errors.

    Raises:
        MalformedError: it is too large, or a field is wrong; the message names the first one.
    """
    if len(data) > MAX_CHECKPOINT_MANIFEST_BYTES:
        raise MalformedError(f"{what}: {len(data)} bytes, the limit is {MAX_CHECKPOINT_MANIFEST_BYTES}")
    try:
        return CheckpointManifest.model_validate_json(data)
    except ValidationError as error:
        raise MalformedError(f"{what} is not a checkpoint manifest: {first_problem(error)}") from None


def checkpoint_objects(folder: str, data: bytes) -> Iterator[str]:
    """Yield the store key of every object that a checkpoint needs, except its manifest.

    Args:
        folder: the checkpoint's folder in the store, `runs/RUN/checkpoints/VERSION`.
        data: content of its manifest.

    Raises:
        MalformedError: `data` is not a valid manifest.
    """
    manifest = decode_checkpoint_manifest(data, what=f"{folder}/manifest.json")
    yield from dict.fromkeys(object_key(folder, each) for each in manifest.objects)
    yield f"{folder}/state.json"


def object_name(lineage: int, digest: str) -> str:
    """Return the last part of an object's store key, which contains its lineage and digest."""
    # with the lineage: a start may delete what an older trainer left behind, and never what a newer one writes now
    return f"{lineage}-{digest}.safetensors"


def object_key(folder: str, stored: CheckpointObject) -> str:
    """Return the store key of an object; all checkpoints of a run share one folder of objects.

    Args:
        folder: folder in the store of any checkpoint of the run, `runs/RUN/checkpoints/VERSION`.
    """
    return f"{folder.rpartition('/')[0]}/objects/{stored.name}"
