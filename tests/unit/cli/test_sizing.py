"""The estimates of `tba sizing` beside what is really written and held."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.learner.learner import Optimizer
from tba_trainer.model.policy import load_policy
from transformers import AutoConfig, AutoModelForCausalLM

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba.wire import VersionSpan, encode_rollout
from tba_cli.main import main
from tba_cli.sizing import SHAPES, estimate, known_shape, shape_in_recipe, shape_of_folder
from tba_cli.sizing.estimate import trainer_state_bytes
from tests.support.tiny_model import make_tiny_model
from tests.support.wire_values import scored_rollout

ROOT = Path(__file__).parents[3]


def recipe_of(*sets: str, name: str = "gsm8k") -> Recipe:
    return load_recipe(ROOT / f"recipes/{name}.toml", sets=list(sets), environ={})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sizing") / "model", hidden_size=32)


PUBLISHED = {
    "1b": 1_100_048_384,
    "7b": 7_615_616_512,
    "32b": 32_763_876_352,
    "quickstart": 132_416,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mnoukhov/pythia410m-sft-tldr": 405_334_016,
    "EleutherAI/pythia-2.8b-deduped": 2_775_208_960,
    "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr": 6_857_302_016,  # the language model's
    "meta-llama/Llama-Guard-3-8B": 8_030_261_248,
    "facebook/roberta-hate-speech-dynabench-r4-target": 124_647_170,
    "realtreetune/rho-1b-sft-GSM8K": 1_100_048_384,
    "vicgalle/gpt2-alpaca": 124_439_808,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_known_models_count_what_was_published(name: str) -> None:
    shape = known_shape(name)
    assert shape is not None
    assert shape.num_params == PUBLISHED[name]


def test_a_model_in_no_table_is_unknown() -> None:
    assert known_shape("org/some-7b") is None


# the small models are made, and no table has them
FULL = [path for path in sorted((ROOT / "recipes").glob("*.toml")) if "\n[local.gpus]" in path.read_text()]


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_no_full_recipe_needs_a_downloaded_model(path: Path) -> None:
    recipe = load_recipe(path, environ={})
    shape, source = shape_in_recipe(recipe.model.path, recipe)
    assert source.startswith("the table of known models")
    assert estimate(recipe, shape).version_bytes > 0


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_names_the_sizes_of_the_model_that_it_counts(name: str) -> None:
    shape = SHAPES[name]
    if "model_type" not in shape.config:
        return  # an encoder, which is not trained
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape.config))
    assert shape.num_params == sum(parameter.numel() for parameter in made.parameters())


def test_a_model_at_hand_is_counted_in_its_files(model: Path) -> None:
    shape = shape_of_folder(model)
    assert shape.num_params == sum(t.numel() for path in model.glob("*.safetensors") for t in load_file(path).values())
    config = json.loads((model / "config.json").read_text())
    assert (shape.hidden_size, shape.num_layers) == (config["hidden_size"], config["num_hidden_layers"])


@pytest.mark.parametrize("num_tokens", [64, 1000, 4000])
def test_a_rollout_is_as_long_as_estimated(num_tokens: int) -> None:
    text = "abcd" * num_tokens
    rollout = replace(scored_rollout(num_tokens), prompt_tokens=np.arange(20, dtype=np.int32), response_text=text)
    rollout = replace(rollout, version_spans=(VersionSpan(version=rollout.version, start=0, end=num_tokens),))
    recipe = recipe_of("searcher.max_prompt_tokens=20", f"searcher.max_response_tokens={num_tokens}")
    assert estimate(recipe, SHAPES["1b"]).rollout_bytes == pytest.approx(len(encode_rollout(rollout)), rel=0.1)


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
    assert trainer_state_bytes(recipe_of(), shape) == held + gradients + moments


def test_processes_share_state_and_lora_has_little_of_it() -> None:
    whole = trainer_state_bytes(recipe_of("trainer.num_processes=1"), SHAPES["7b"])
    gpus = "local.gpus.trainer=[0,1,2,3,4,5,6,7]"
    assert trainer_state_bytes(recipe_of("trainer.num_processes=8", gpus), SHAPES["7b"]) == whole // 8
    recipe = recipe_of("model.lora.rank=16")
    assert trainer_state_bytes(recipe, SHAPES["7b"]) < whole / 3
    lora = estimate(recipe, SHAPES["7b"])
    full = estimate(recipe_of(), SHAPES["7b"])
    assert full.version_bytes == 2 * SHAPES["7b"].num_params
    assert lora.version_bytes < full.version_bytes / 40
    assert lora.store_bytes - lora.version_bytes > full.version_bytes  # the starting model is whole


def test_the_command_traces_the_step_and_prints_people_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sizing", str(ROOT / "recipes/quickstart.toml")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "parameters from what [model.warm_start] makes" in printed
    assert "peak of a step; traced on fake tensors with 2 of 2 layers" in printed
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"]["version_bytes"] == 4 * found["shape"]["num_params"]
    assert found["trainer"]["bytes"]["gradients"] == 4 * found["shape"]["num_params"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "13b"], "--model '13b' is not known; known are 1b, 7b, 32b"),
        (["--model", "1b", "--gpu-memory-gib", "0"], "--gpu-memory-gib is 0; it must be above 0"),
        (
            ["--model", "7b", "--set", "trainer.gradient_checkpointing=29"],
            "trainer.gradient_checkpointing = 29, and the model has 28 layers; set it to that number at most",
        ),
        (["--set", "model.path=nowhere"], "'nowhere' is in no table of known models; name a size"),
    ],
)
def test_bad_input_is_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizing", str(ROOT / "recipes/gsm8k.toml"), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="to count the parameters of"):
        shape_of_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        shape_of_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    with pytest.raises(ConfigError, match="does not name hidden size"):
        shape_of_folder(tmp_path)


BLOCKS = re.findall(r"```\n\$ tba (sizing .*)\n((?:.+\n)+?)```", (ROOT / "docs/recipes.md").read_text())


@pytest.mark.parametrize(("command", "printed"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_documented_estimates_are_what_the_command_prints(
    command: str, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed
