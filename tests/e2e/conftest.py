"""One starting model for every run of this folder, and places to run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e import Place, tiny_sections

MakePlace = Callable[..., Place]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that adds right a few times in a hundred: rewards differ, so gradients are not zero."""
    from tba_cli.starter_models.starting_model import make_starting_model

    folder = tmp_path_factory.mktemp("model") / "start"
    make_starting_model(folder, seed=0, num_threads=1, target_accuracy=0.05, noise_steps=0)
    return folder


@pytest.fixture(scope="module")
def make_place(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[MakePlace]:
    """Call it with recipe sections; everything that still runs at the end of the module is killed."""
    places: list[Place] = []

    def make(*, environ: dict[str, str] | None = None, **sections: dict[str, Any]) -> Place:
        places.append(Place(tmp_path_factory.mktemp("place"), tiny_sections(model, **sections), environ or {}))
        return places[-1]

    yield make
    for place in places:
        place.close()
