"""The launcher of a trainer of several processes: what it refuses before it starts any."""

from __future__ import annotations

from pathlib import Path

import pytest
from tba_trainer.distributed.launch import main


def test_a_wrong_recipe_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[run]\nname = 5\n")
    assert main(["2", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: trainer: {path}: ")
    assert err.count("\n") == 1


def test_several_machines_must_know_where_they_meet(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["2", "--nodes", "2", "--config", "recipe.toml"])
    assert caught.value.code == 2
    assert "--nodes and --rendezvous go together" in capsys.readouterr().err
