"""The estimates of `tba sizing` beside what is really written and held."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.learner.learner import Optimizer
from tba_trainer.memory_trace import __main__ as memory_trace
from tba_trainer.model.policy import load_policy

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba.wire import VersionSpan, encode_rollout
from tba_cli.commands import sizing
from tba_cli.main import main
from tba_cli.sizing.estimate import estimate
from tba_cli.sizing.model_shape import ModelShape, shape_of_folder
from tests.support.model_shapes import QWEN_7B, SHAPES
from tests.support.rollout_values import replace
from tests.support.tiny_model import make_tiny_model
from tests.support.wire_values import scored_rollout

ROOT = Path(__file__).parents[3]


def recipe_of(*sets: str, name: str = "gsm8k") -> Recipe:
    return load_recipe(ROOT / f"recipes/{name}.toml", sets=list(sets), environ={})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sizing") / "model", hidden_size=32)


def test_a_model_at_hand_is_counted_in_its_files(model: Path) -> None:
    shape = shape_of_folder(model)
    assert shape.num_params == sum(t.numel() for path in model.glob("*.safetensors") for t in load_file(path).values())
    config = json.loads((model / "config.json").read_text())
    assert (shape.hidden_size, shape.num_layers) == (config["hidden_size"], config["num_hidden_layers"])


@pytest.mark.parametrize("num_tokens", [64, 1000, 4000])
def test_a_rollout_is_as_long_as_estimated(num_tokens: int) -> None:
    text = "abcd" * num_tokens
    rollout = replace(scored_rollout(num_tokens), prompt_tokens=np.arange(20, dtype=np.int32), response_text=text)
    rollout = replace(rollout, version_spans=(VersionSpan.of(rollout.version, 0, num_tokens),))
    recipe = recipe_of("searcher.max_prompt_tokens=20", f"searcher.max_response_tokens={num_tokens}")
    assert estimate(recipe, QWEN_7B).rollout_bytes == pytest.approx(len(encode_rollout(rollout)), rel=0.1)


def test_weights_gradients_and_moments_take_what_is_estimated(model: Path) -> None:
    section = recipe_of(f"model.path={json.dumps(str(model))}").model
    policy = load_policy(section, device="cpu", gradient_checkpointing=False)
    trainer = recipe_of().trainer
    optimizer = Optimizer(policy, trainer)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in policy.parameters())
    optimizer.apply(learning_rate=1e-4)
    held = sum(p.numel() * p.element_size() for p in policy.parameters())
    state = optimizer.state_tensors()
    moments = sum(t.numel() * t.element_size() for name, t in state.items() if not name.startswith("step."))
    shape = shape_of_folder(model)
    assert estimate(recipe_of(), shape).checkpoint_bytes == held + moments
    assert gradients == held


def test_versions_of_an_adapter_are_small_and_the_starting_model_is_whole() -> None:
    lora, full = estimate(recipe_of("model.lora.rank=16"), QWEN_7B), estimate(recipe_of(), QWEN_7B)
    assert full.version_bytes == 2 * QWEN_7B.num_params
    assert lora.version_bytes < full.version_bytes / 40
    assert lora.store_bytes - lora.version_bytes > full.version_bytes


def test_the_command_traces_the_step_and_prints_people_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []
    trace = sizing._trace

    def trace_once(recipe: Recipe, shape: ModelShape) -> Any:
        if not traced:
            traced.append(trace(recipe, shape))
        return traced[0]

    monkeypatch.setattr(sizing, "_trace", trace_once)
    words = ["sizing", str(ROOT / "recipes/quickstart.toml")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "0.000132B parameters; 1 trainer process(es)" in printed
    assert "peak of a step; traced on fake tensors with 2 of 2 layers" in printed
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"]["version_bytes"] == 4 * found["shape"]["num_params"]
    assert found["trainer"]["bytes"]["gradients"] == 4 * found["shape"]["num_params"]


@pytest.mark.parametrize(
    ("recipe", "words", "sentence"),
    [
        ("quickstart", ["--gpu-memory-gib", "0"], "--gpu-memory-gib is 0; it must be above 0"),
        ("redteam", [], "gpt2-sft-redteam is not here"),
    ],
)
def test_bad_input_is_a_sentence(
    recipe: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sizing", str(ROOT / f"recipes/{recipe}.toml"), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="there is no"):
        shape_of_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="safetensors"):
        shape_of_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    with pytest.raises(ConfigError, match="does not name hidden size"):
        shape_of_folder(tmp_path)


BLOCKS = re.findall(r"```\n\$ tba (sizing .*)\n((?:.+\n)+?)```", (ROOT / "docs/recipes.md").read_text())


@pytest.mark.parametrize(("command", "printed"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_documented_estimates_are_what_the_command_prints(
    command: str, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace_here(module: str, words: list[str]) -> str:
        """The program in this process, which has imported torch."""
        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            patch.setattr("sys.argv", [module, *words])
            assert memory_trace.main() == 0
        return out.getvalue()

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sizing, "_shape_in", lambda recipe, path: SHAPES[path])
    monkeypatch.setattr(sizing, "run_program", trace_here)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed
