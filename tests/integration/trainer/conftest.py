"""One run for a test of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A recorded buffer and a real store, empty."""
    return World(tmp_path)
