"""The parts of snapshots that need no service: sources, manifests, and the order in which a load replays them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.snapshots.load import PART_BYTES, PART_ROLLOUTS, split_parts
from tba_buffer.snapshots.save import READ_BYTES, READ_ROLLOUTS, _read_sizes
from tba_buffer.snapshots.snapshot_format import PLACE_DTYPE, decode_places, encode_places

from tba.errors import ConfigError, MalformedError
from tba.versions import PolicyVersion
from tba.wire.snapshot_manifest import (
    SavedLineage,
    SavedPublication,
    SnapshotManifest,
    SnapshotSource,
    decode_snapshot_manifest,
    encode_snapshot_manifest,
)


def manifest() -> SnapshotManifest:
    source = {"run": "demo", "name": "end", "created_at_s": 1.0, "tba_version": "0", "storage_format": 1}
    place = {"log_position": 30, "lineage": 1, "step": 8, "latest_version": "1-8"}
    lineages = {1: SavedLineage(parent="0-0", trainer_id="t", created_at_s=1.0)}
    marks = [SavedPublication(position=at, version=version) for at, version in ((1, "0-0"), (9, "1-4"), (20, "0-0"))]
    nums = {"num_scored": 3, "num_pending": 2, "num_failed": 1, "num_prompts": 4}
    model = {"policy_temperature": 1.0, "start_params_sha256": None}
    fields: Any = {**source, **place, **nums, **model, "rollouts": [], "live": [], "prompts": []}
    return SnapshotManifest(lineages=lineages, marks=marks, **fields)


def test_a_source_is_a_run_and_a_name() -> None:
    source = SnapshotSource.parse("demo/at.end-1")
    assert (source.run, source.name, str(source)) == ("demo", "at.end-1", "demo/at.end-1")
    assert source.manifest_key == "runs/demo/snapshots/at.end-1/manifest.json"
    for text in ("", "demo", "demo/", "/end", "a/b/c", "../x/y", "demo/e nd", "demo/end\n"):
        with pytest.raises(ConfigError, match="is not of the form RUN/NAME"):
            SnapshotSource.parse(text)


def test_a_manifest_survives_its_bytes_and_wrong_ones_name_the_field() -> None:
    assert decode_snapshot_manifest(encode_snapshot_manifest(manifest()), key="k") == manifest()
    assert manifest().num_rollouts == 6
    document = json.loads(encode_snapshot_manifest(manifest()))
    for change in ({"schema_version": 2}, {"extra": 1}, {"log_position": -1}, {"marks": [{"position": 1}]}):
        with pytest.raises(MalformedError, match=f"snapshot manifest runs/a/m.json: {next(iter(change))}"):
            decode_snapshot_manifest(json.dumps(document | change).encode(), key="runs/a/m.json")
    with pytest.raises(MalformedError, match=r"m\.json: latest_version: 7-8 is of no lineage that `lineages` has"):
        decode_snapshot_manifest(json.dumps(document | {"latest_version": "7-8"}).encode(), key="runs/a/m.json")
    with pytest.raises(MalformedError, match=r"snapshot manifest runs/a/m\.json: document"):
        decode_snapshot_manifest(b"{", key="runs/a/m.json")


def test_the_last_publication_of_a_version_counts() -> None:
    found = manifest().publication_of(PolicyVersion(0, 0))
    assert found is not None
    assert found.position == 20
    assert manifest().publication_of(PolicyVersion(1, 5)) is None


def places_at(positions: list[int], num_bytes: int = 100) -> np.ndarray:
    return np.array([(position, 0, 0, num_bytes) for position in positions], dtype=PLACE_DTYPE)


def test_the_live_table_survives_its_bytes_and_cut_ones_are_refused() -> None:
    places = places_at([3, 5, 8])
    assert (decode_places(encode_places(places)) == places).all()
    with pytest.raises(MalformedError, match="not rows of 20"):
        decode_places(encode_places(np.frombuffer(b"x" * 7, dtype="u1")))


@given(
    st.sets(st.integers(1, 3000), max_size=1500), st.sets(st.integers(1, 3000), max_size=5), st.integers(1, 8_000_000)
)
def test_a_load_replays_the_log_in_order_in_bounded_parts(positions: set[int], marks: set[int], num_bytes: int) -> None:
    places = places_at(sorted(positions - marks), num_bytes)
    found = list(split_parts(places, [SavedPublication(position=at, version="1-1") for at in sorted(marks)], 3000))
    order: list[tuple[int, str]] = []
    for part in found:
        order += [(position, "rollout") for position in part.places["position"].tolist()]
        order += [(part.publication.position, "mark")] if part.publication is not None else []
        assert len(part.places) <= PART_ROLLOUTS
        assert len(part.places) == 1 or int(part.places["num_bytes"].sum()) <= PART_BYTES
        assert part.cursor >= max((position for position, _ in order), default=0)
    assert order == sorted(
        [*((position, "rollout") for position in positions - marks), *((position, "mark") for position in marks)]
    )
    cursors = [part.cursor for part in found]
    assert cursors == sorted(cursors)
    assert cursors[-1] == 3000


@given(st.lists(st.integers(1, 2 * READ_BYTES), max_size=40), st.integers(0, 2 * READ_ROLLOUTS))
def test_payloads_are_read_in_bounded_runs_that_cover_everything_once(sizes: list[int], num_small: int) -> None:
    num_bytes = np.array([*sizes, *([10] * num_small)], dtype=np.uint32)
    runs = list(_read_sizes(num_bytes))
    assert [i for run in runs for i in range(run.start, min(run.stop, len(num_bytes)))] == list(range(len(num_bytes)))
    for run in runs:
        chosen = num_bytes[run]
        assert 1 <= len(chosen) <= READ_ROLLOUTS
        assert len(chosen) == 1 or int(chosen.sum(dtype=np.int64)) <= READ_BYTES
