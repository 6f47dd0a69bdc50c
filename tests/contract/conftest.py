"""Both stores behind one fixture: the embedded one in a folder, and boto3 against a real S3 server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tba.config.sections import StoreSection
from tba.store import ObjectStore, open_store
from tests.support.s3_server import S3Server, s3_with_bucket

BUCKET = "tba-contract"
_prefixes = itertools.count()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for the session, with one bucket."""
    with s3_with_bucket(tmp_path_factory.mktemp("s3-server"), BUCKET) as server:
        yield server


@pytest.fixture
def s3_section(s3_server: S3Server) -> StoreSection:
    """A store section with a prefix of its own in the bucket."""
    return StoreSection(
        url=f"s3://{BUCKET}/test-{next(_prefixes)}/deep", endpoint_url=s3_server.url, region="us-east-1"
    )


@pytest.fixture(params=["file", "s3"])
def section(request: pytest.FixtureRequest, tmp_path: Path) -> StoreSection:
    """The section of a store of each kind."""
    if request.param == "file":
        return StoreSection(url=f"file://{tmp_path / 'store'}")
    return request.getfixturevalue("s3_section")


@pytest.fixture
def store(section: StoreSection) -> ObjectStore:
    """An empty store of each kind."""
    return open_store(section)
