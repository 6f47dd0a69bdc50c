"""GET /v1/versions: the weight versions that the object store has."""

from __future__ import annotations

from tba.fields import StrictModel, VersionText


class WeightVersionInfo(StrictModel):
    """One published weight version, as its manifest says."""

    version: VersionText
    parent: VersionText | None
    """The version that its lineage continued from, or None."""
    published_at_s: float
    """When its manifest was made, Unix seconds."""
    num_bytes: int
    """Of its tensors; config and tokenizer are shared by versions and small."""
    dtype: str


class WeightVersionList(StrictModel):
    """GET /v1/versions: the newest versions first."""

    versions: list[WeightVersionInfo]
    num_older: int
    """Versions in the store that the list leaves out."""
