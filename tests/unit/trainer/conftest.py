"""One tiny model for all tests of the trainer's parts; none of them changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tba_trainer.model.policy import load_policy

from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import make_recipe


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=16, num_layers=1)


@pytest.fixture(scope="session")
def model(folder: Path) -> Any:
    return load_policy(make_recipe(folder).model, device="cpu", gradient_checkpointing=False)
