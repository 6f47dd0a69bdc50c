"""From publication to verified tensors through a real S3 server over loopback: whole, and as a delta."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.weights_bench.states import State, write
from tba.config.sections import StoreSection
from tba.store import open_store
from tba.versions import PolicyVersion
from tba.weights import LocalVersion, WeightVersions
from tba.wire.weight_manifest import Canary, Manifest
from tests.support.s3_server import CREDENTIALS, S3Server

BUCKET = "tba-bench"
OLD, NEW = PolicyVersion(1, 0), PolicyVersion(1, 1)
KINDS = ("full", "delta")


class World:
    """A store with version OLD of two runs, `full` and `delta`; NEW is in a file, and nowhere else."""

    def __init__(self, folder: Path, section: StoreSection, old: State, new: State) -> None:
        self._folder, self._section = folder, section
        self._config = folder / "config.json"
        self._config.write_text("{}")
        self._paths = {}
        for version, state in ((OLD, old), (NEW, new)):
            self._paths[version] = folder / str(version) / "model.safetensors"
            self._paths[version].parent.mkdir()
            write(state, self._paths[version])
        self.held = {kind: self._publish_old(kind) for kind in KINDS}

    def versions(self, kind: str) -> WeightVersions:
        """Open the run with a client of its own."""
        return WeightVersions(open_store(self._section), kind)

    def publish_new(self, kind: str) -> Manifest:
        """Publish NEW, by `delta` against OLD."""
        return self._publish(kind, NEW, base=self.held[kind] if kind == "delta" else None)

    def download_new(self, kind: str, versions: WeightVersions, name: str) -> LocalVersion:
        """Bring NEW into a folder of its own, `full` as if nothing were there; the files go at once."""
        held = (self.held[kind],) if kind == "delta" else ()
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self._folder) as folder:
            return versions.download_tensors(NEW, Path(folder), held=held)

    def _publish_old(self, kind: str) -> LocalVersion:
        return LocalVersion(OLD, (self._paths[OLD],), self._publish(kind, OLD, base=None))

    def _publish(self, kind: str, version: PolicyVersion, base: LocalVersion | None) -> Manifest:
        return self.versions(kind).publish(
            version=version,
            parent=None if version == OLD else OLD,
            dtype="bfloat16",
            tensors_paths=[self._paths[version]],
            files={"config.json": self._config},
            canary=Canary(prompt_tokens=[1], response_tokens=[1], logprobs=[-1.0], tolerance=1.0),
            torch_version="bench",
            transformers_version="bench",
            base=base,
        )


@contextmanager
def s3_store() -> Iterator[StoreSection]:
    """Yield the settings of a store in a real S3 server on loopback, whose files are in a temporary folder."""
    import pytest

    with tempfile.TemporaryDirectory(prefix="tba-bench-") as name, pytest.MonkeyPatch.context() as patch:
        for variable, value in CREDENTIALS.items():
            patch.setenv(variable, value)
        server = S3Server(Path(name))
        try:
            server.start()
            server.create_bucket(BUCKET)
            yield StoreSection(url=f"s3://{BUCKET}", endpoint_url=server.url, region="us-east-1")
        finally:
            server.kill()


@contextmanager
def _world(section: StoreSection, name: str, old: State, new: State) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        yield World(Path(folder), section.model_copy(update={"url": f"{section.url}/{name}"}), old, new)


def publish_to_ready(section: StoreSection, old: State, new: State) -> dict[str, dict[str, Any]]:
    """Seconds of wall-clock and bytes of one trainer and one searcher that holds OLD, by kind."""
    found = {}
    with _world(section, "publish", old, new) as world:
        for kind in KINDS:
            versions = world.versions(kind)
            start = time.perf_counter()
            manifest = world.publish_new(kind)
            middle = time.perf_counter()
            local = world.download_new(kind, versions, "searcher")
            _require_route(local, kind)
            found[kind] = {
                "publish_s": middle - start,
                "download_s": time.perf_counter() - middle,
                "ready_s": time.perf_counter() - start,
                "stored_bytes": manifest.delta_bytes or manifest.full_bytes,
                "downloaded_bytes": local.downloaded_bytes,
            }
    return found


def _require_route(local: LocalVersion, kind: str) -> None:
    if local.route != kind or local.num_failed_routes:
        raise SystemExit(f"a searcher took the route {local.route} after {local.num_failed_routes} failed ones")
