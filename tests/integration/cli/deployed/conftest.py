"""One deployment for the tests of `tba setup`, `tba model` and `tba doctor`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.deployment import Deployment, deployed


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """S3 server, Redis, buffer and reward service, set up by the tests themselves."""
    with deployed(tmp_path_factory.mktemp("deployment")) as started:
        yield started


@pytest.fixture(scope="session")
def ready(deployment: Deployment) -> Deployment:
    from tba_cli.main import main

    recipe = deployment.write("ready")
    assert main(["setup", "--config", str(recipe), "--create-bucket", "--wait-s", "120"]) == 0
    return deployment
