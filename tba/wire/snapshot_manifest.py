"""The snapshot manifest: the immutable JSON document that makes one saved buffer exist.

    runs/<run>/snapshots/<name>/rollouts-<attempt>-00000.msgpack   rollouts, one msgpack document after the other
                                live-<attempt>-00000.msgpack       log position, object, offset of each live rollout
                                prompts-<attempt>-00000.jsonl      prompts in upload order
                                manifest.json                      written last, create-only

It lists every object with size and sha256, and the lineages and publications of the run. A snapshot is named RUN/NAME.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from tba.errors import ConfigError, MalformedError
from tba.fields import MAX_LINEAGE, MAX_NUMBER, MAX_STEP, StrictModel, first_problem
from tba.store import ObjectStore
from tba.versions import START, PolicyVersion
from tba.wire.weight_manifest import Sha256, StoredObject

MANIFEST_NAME = "manifest.json"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
SOURCE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}/[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
NAME_SENTENCE = "a name is 1 to 63 of A-Z a-z 0-9 . _ - and begins with a letter or a digit"
Version = Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,12}$")]


class SavedLineage(StrictModel):
    """One lineage of the saved run. `created_at_s` is Unix seconds."""

    parent: Version
    trainer_id: str
    created_at_s: float


class SavedPublication(StrictModel):
    """A publication: its position in the log, and the version that it announced."""

    position: int = Field(ge=1, le=MAX_NUMBER)
    version: Version

    @property
    def policy_version(self) -> PolicyVersion:
        """The version, parsed."""
        return PolicyVersion.parse(self.version)


class SnapshotManifest(StrictModel):
    """The manifest of one snapshot, which holds exactly the rollouts that were live at `log_position`."""

    schema_version: Literal[1] = 1
    run: str
    name: str
    log_position: int = Field(ge=0, le=MAX_NUMBER)
    created_at_s: float
    tba_version: str
    storage_format: int = Field(ge=1)
    """Storage format of the Redis that the snapshot was saved from; a run of another format cannot load it."""
    lineage: int = Field(ge=0, le=MAX_LINEAGE)
    """The active lineage; 0 if no trainer had started."""
    step: int = Field(ge=0, le=MAX_STEP)
    latest_version: Version | None
    lineages: dict[Annotated[int, Field(ge=1, le=MAX_LINEAGE)], SavedLineage]
    marks: list[SavedPublication]
    """All publications with a known log position, in the order of the log."""
    num_scored: int = Field(ge=0)
    num_pending: int = Field(ge=0)
    num_failed: int = Field(ge=0)
    num_prompts: int = Field(ge=0)
    policy_temperature: float = Field(gt=0)
    start_params_sha256: Sha256 | None
    """`params_sha256` of the starting model (version 0-0), if it was published."""
    rollouts: list[StoredObject]
    live: list[StoredObject]
    prompts: list[StoredObject]

    @property
    def num_rollouts(self) -> int:
        """Number of live rollouts."""
        return self.num_scored + self.num_pending + self.num_failed

    @property
    def objects(self) -> list[StoredObject]:
        """All objects of the snapshot except the manifest."""
        return [*self.rollouts, *self.live, *self.prompts]

    def publication_of(self, version: PolicyVersion) -> SavedPublication | None:
        """Return the last publication of a version; None if it has none."""
        return next((each for each in reversed(self.marks) if each.policy_version == version), None)


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """The name of a snapshot, written RUN/NAME."""

    run: str
    name: str

    @classmethod
    def parse(cls, text: str) -> SnapshotSource:
        """Parse RUN/NAME.

        Raises:
            ConfigError: the text has another form.
        """
        if re.fullmatch(SOURCE_PATTERN, text) is None:
            raise ConfigError(
                f"snapshot {text!r} is not of the form RUN/NAME, for example quickstart/end; {NAME_SENTENCE}"
            )
        return cls(*text.split("/"))

    def __str__(self) -> str:
        return f"{self.run}/{self.name}"

    @property
    def prefix(self) -> str:
        """Common prefix of the store keys of its objects."""
        return f"runs/{self.run}/snapshots/{self.name}/"

    @property
    def manifest_key(self) -> str:
        """Store key of its manifest."""
        return self.prefix + MANIFEST_NAME


def check_snapshot_name(name: str) -> None:
    """Check the name of a snapshot, without its run.

    Raises:
        ConfigError: the name is not allowed.
    """
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise ConfigError(f"snapshot name {name!r} cannot be used: {NAME_SENTENCE}")


def snapshot_names(store: ObjectStore, run: str) -> list[str]:
    """Return the names of the complete snapshots of a run.

    Raises:
        StoreError
    """
    prefix = f"runs/{run}/snapshots/"
    found = [key.removeprefix(prefix).split("/") for key in store.list(prefix)]
    return [parts[0] for parts in found if parts[1:] == [MANIFEST_NAME]]


def encode_snapshot_manifest(manifest: SnapshotManifest) -> bytes:
    """Encode as JSON, keys in a fixed order."""
    return manifest.model_dump_json(indent=1).encode() + b"\n"


def decode_snapshot_manifest(data: bytes, *, key: str) -> SnapshotManifest:
    """Parse a manifest.

    Args:
        data: content of the object.
        key: its store key, for errors.

    Raises:
        MalformedError: the message names the object and the first wrong field.
    """
    try:
        manifest = SnapshotManifest.model_validate_json(data)
    except ValidationError as error:
        raise MalformedError(f"snapshot manifest {key}: {first_problem(error)}") from None
    latest = PolicyVersion.parse(manifest.latest_version or str(START))
    if latest.lineage and latest.lineage not in manifest.lineages:
        raise MalformedError(f"snapshot manifest {key}: latest_version: {latest} is of no lineage that `lineages` has")
    return manifest
