"""A read-through cache of the store: the store gives each file once; whatever the cache does, versions arrive whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tba.config.sections import StoreSection
from tba.errors import ConfigError
from tba.store import ObjectStore, open_read_through, open_store
from tba.weights import LocalVersion, WeightVersions, object_source, params_sha256_of_files
from tests.support.read_through import ReadThroughCache
from tests.support.weight_chain import RUN, Chain, version

NONE = {"routes_failed": 0, "not_cached": 0}


@pytest.fixture
def cache(s3_section: StoreSection) -> Iterator[ReadThroughCache]:
    """A cache before the S3 server."""
    assert s3_section.endpoint_url is not None
    with ReadThroughCache(s3_section.endpoint_url).running() as running:
        yield running


def through(section: StoreSection, url: str) -> ObjectStore | None:
    """The client of a cache. To make one takes half a second on a busy machine, so readers share it and the store's."""
    return open_read_through(section.model_copy(update={"read_through_url": url}))


class Reader:
    """A searcher's view of the store, with a folder of its own."""

    def __init__(self, store: ObjectStore, read_through: ObjectStore | None, folder: Path) -> None:
        self.versions = WeightVersions(store, RUN, read_through=read_through)
        self._folder = folder

    def get(self, step: int, *held: LocalVersion) -> LocalVersion:
        """Download 1-<step>, and check the tensors and that no route failed."""
        local = self.versions.download_tensors(version(step), self._folder / str(step), held=held)
        assert params_sha256_of_files(local.paths) == local.manifest.params_sha256
        assert local.num_failed_routes == 0
        return local


def test_the_store_gives_each_file_once_and_what_a_cache_spoils_lacks_or_refuses(
    s3_section: StoreSection, cache: ReadThroughCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, client = open_store(s3_section), through(s3_section, cache.url)
    Chain(store, tmp_path / "chain").extend(3)
    for name in ("a", "b"):
        reader = Reader(store, client, tmp_path / name)
        base = reader.get(0)
        change = reader.get(1, base)
        assert (base.route, change.route) == ("full", "delta")
        assert reader.versions.counts == {**NONE, "read_through_bytes": cache.store_bytes}
        assert base.downloaded_bytes + change.downloaded_bytes == cache.store_bytes

    # one bit of the tensors, a file that is cut short, and one without an end
    flip = lambda body: body[:-1] + bytes([body[-1] ^ 1])  # noqa: E731
    for number, spoil in enumerate((flip, lambda body: body[:-100], lambda body: body + bytes(10**6))):
        cache.spoil = spoil
        reader, num_before = Reader(store, client, tmp_path / f"spoilt-{number}"), cache.num_requests
        base = reader.get(0)
        if number == 2:
            assert cache.num_requests - num_before == 1, "HEAD says that it is too large: it is not read"
        num_before = cache.num_requests
        assert reader.versions.counts["read_through_damaged"] == 1
        reader.get(1, base)
        assert cache.num_requests == num_before  # it is left alone for a while
        # a version takes longer to download than the cache is left alone; its config is a file of the cache, too
        with monkeypatch.context() as patch:
            patch.setattr(object_source, "REST_S", 0.0)
            reader = Reader(store, client, tmp_path / f"spoilt-model-{number}")
            local = reader.versions.download_model(version(0), tmp_path / f"spoilt-model-{number}")
            assert local.num_failed_routes == 0
            assert reader.versions.counts["read_through_damaged"] == 2

    cache.spoil, cache.trailer = lambda body: body, bytes(10**6)
    endless = Reader(store, client, tmp_path / "endless")
    size_bytes = endless.get(0).downloaded_bytes
    assert endless.versions.counts == {**NONE, "read_through_bytes": size_bytes}, "cut at what HEAD says"
    cache.spoil, cache.trailer = flip, b""
    cache.sends_length = False
    unsized = Reader(store, client, tmp_path / "unsized")
    unsized.get(0)
    assert unsized.versions.counts == {**NONE, "read_through_unavailable": 1}
    cache.sends_length = True
    lacking = Reader(store, through(s3_section, f"{cache.url}/elsewhere"), tmp_path / "lacking")
    lacking.get(1, lacking.get(0))
    assert lacking.versions.counts == {**NONE, "read_through_missing": 2}
    away = Reader(store, through(s3_section, "http://127.0.0.1:9"), tmp_path / "away")
    away.get(2, away.get(1))
    assert away.versions.counts == {**NONE, "read_through_unavailable": 1}


def test_a_cache_that_cannot_be_used_is_refused_at_the_start(s3_section: StoreSection) -> None:
    with pytest.raises(ConfigError, match=r"store\.read_through_url 'cache:80' is not a URL such as"):
        through(s3_section, "cache:80")
    with pytest.raises(ConfigError, match=r"store\.read_through_url has a user, a password or options in it") as caught:
        through(s3_section, "http://reader:hidden@cache")
    assert "hidden" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"read_through_url is for an S3 store, and store\.url is 'file://x'"):
        through(StoreSection(url="file://x"), "http://cache")
