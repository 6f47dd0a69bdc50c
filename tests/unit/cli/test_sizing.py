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
from tba_trainer.supervised.new_model import new_config, train_tokenizer
from transformers import AutoModelForCausalLM

from tba.config import Recipe, load_recipe
from tba.config.supervised import NewModel
from tba.errors import ConfigError
from tba.wire import VersionSpan, encode_rollout
from tba_cli.main import main
from tba_cli.sizing import (
    MAKER_SHAPES,
    SHAPES,
    Load,
    estimate,
    known_shape,
    shape_of_config,
    shape_of_folder,
    shape_of_new_model,
)
from tba_cli.sizing.estimate import DTYPE_BYTES
from tba_cli.starter_models.random_models import KINDS, write_model
from tests.support.tiny_model import Architecture, make_tiny_model
from tests.support.wire_values import scored_rollout

ROOT = Path(__file__).parents[3]
LOAD = Load(prompt_tokens=20, response_tokens=1000, step_s=10.0, num_searchers=3, concurrent_rollouts=64)


def recipe_of(*sets: str, name: str = "gsm8k") -> Recipe:
    return load_recipe(ROOT / f"recipes/{name}.toml", sets=list(sets), environ={})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sizing") / "model", hidden_size=32)


@pytest.mark.parametrize(
    ("staging", "places"), [("auto", ["memory", "disk"]), ("memory", ["memory"]), ("disk", ["disk"])]
)
def test_the_loop_waits_for_the_disk_only_where_a_checkpoint_is_copied_there(
    staging: str, places: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sizing", str(ROOT / "recipes/math.toml"), "--model", "7b", "--disk-gb-s", "2"]
    arguments += ["--set", f"trainer.checkpoint_staging={staging}"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    costs, num_bytes = document["loop_costs"], document["estimate"]["checkpoint_bytes"]
    assert list(costs) == ["version", *(f"checkpoint_{place}" for place in places)]
    for place in places:
        expected_s = num_bytes / 2e9 if place == "disk" else 0.0
        assert costs[f"checkpoint_{place}"]["disk_s"] == pytest.approx(expected_s)
        assert costs[f"checkpoint_{place}"]["device_s"] == pytest.approx(num_bytes / 4 / 55e9)  # 4 processes copy
    assert main(arguments) == 0
    lines = capsys.readouterr().out
    assert [place for place in ("memory", "disk") if f"loop waits: checkpoint_{place}" in lines] == places
    assert ("to memory where 113 GiB are free" in lines) == (staging == "auto")


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
    "openai-community/gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_known_models_count_what_was_published(name: str) -> None:
    shape = known_shape(name)
    assert shape is not None
    assert shape.num_params == PUBLISHED[name]


def test_a_token_passes_through_its_own_experts_alone() -> None:
    """Qwen names 3.3 B of the 30.5 B."""
    experts, dense = known_shape("Qwen/Qwen3-30B-A3B"), known_shape("Qwen/Qwen3-8B")
    assert experts is not None
    assert dense is not None
    assert experts.num_active_params == pytest.approx(3.35e9, rel=0.005)
    assert dense.num_active_params == dense.num_params


def test_a_model_in_no_table_is_unknown() -> None:
    assert known_shape("org/some-7b") is None


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_no_recipe_needs_a_downloaded_model(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["sizing", str(path)])
    printed, error = capsys.readouterr()
    assert code == 0, error
    assert "GPU memory" in printed
    assert ("from the table of makers" in printed) == path.stem.endswith("-tiny")


POLICIES = {name: kind for name, kind in KINDS.items() if kind.model_class.endswith(("CausalLM", "LMHeadModel"))}


def test_every_maker_of_a_policy_is_in_the_table() -> None:
    assert set(MAKER_SHAPES) == set(POLICIES)


@pytest.mark.parametrize("maker", POLICIES)
def test_a_maker_makes_what_the_table_says(maker: str, tmp_path: Path) -> None:
    write_model(tmp_path / maker, replace(POLICIES[maker], is_pretrained=False), seed=0)
    assert shape_of_folder(tmp_path / maker) == MAKER_SHAPES[maker]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe", "gpt_neox"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_config_alone_counts_as_the_files_do(tmp_path: Path, architecture: Architecture, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture=architecture, tied=tied)
    assert shape_of_config(json.loads((folder / "config.json").read_text())) == shape_of_folder(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("inner", [None, 40])
def test_a_new_model_counts_as_the_one_that_is_made(family: str, inner: int | None) -> None:
    sizes = {"hidden_size": 16, "num_layers": 3, "num_heads": 2, "intermediate_size": inner, "max_length_tokens": 64}
    section = NewModel.model_validate({"family": family, **sizes, "vocab_size": 258})  # 256 bytes, two special tokens
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(new_config(section, train_tokenizer(["a"], section)))
    assert shape_of_new_model(section).num_params == sum(parameter.numel() for parameter in made.parameters())


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
    load = replace(LOAD, response_tokens=num_tokens)
    assert estimate(recipe_of(), SHAPES["1b"], load).rollout_bytes == pytest.approx(
        len(encode_rollout(rollout)), rel=0.1
    )


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
    found = estimate(recipe_of(), shape, LOAD)
    assert found.checkpoint_bytes == held + moments
    # a behaviour anchor needs no reference: what is left of the state is these, the rest is activations and logits
    recipe = recipe_of('objective.preset="kimi"', "trainer.micro_batch_tokens=1", name="quickstart")
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"micro_batch_tokens": 1})})
    bare = estimate(recipe, shape, LOAD).trainer_gpu_bytes
    assert held + gradients + moments < bare < 1.5 * (held + gradients + moments) + 100_000


def test_processes_share_state_and_lora_has_little_of_it() -> None:
    whole = estimate(recipe_of("trainer.num_processes=1"), SHAPES["7b"], LOAD).trainer_gpu_bytes
    shared = estimate(
        recipe_of("trainer.num_processes=8", "local.gpus.trainer=[0,1,2,3,4,5,6,7]"), SHAPES["7b"], LOAD
    ).trainer_gpu_bytes
    lora = estimate(recipe_of("model.lora.rank=16"), SHAPES["7b"], LOAD)
    assert shared < whole / 3
    assert lora.trainer_gpu_bytes < whole / 2
    merged = estimate(recipe_of("model.lora.rank=16", 'model.lora.publish="merged"'), SHAPES["7b"], LOAD)
    assert merged.version_bytes == 2 * SHAPES["7b"].num_params
    assert lora.version_bytes < merged.version_bytes / 40
    assert lora.store_bytes - lora.version_bytes > merged.version_bytes  # the starting model is whole


def test_processes_that_share_sequences_have_a_part_of_the_activations_and_the_keys_of_all() -> None:
    sets = ["trainer.num_processes=8", "local.gpus.trainer=[0,1,2,3,4,5,6,7]", "trainer.micro_batch_tokens=32768"]
    sets += ["trainer.gradient_checkpointing=true"]
    alone, half, one = (
        estimate(recipe_of(*sets, f"trainer.sharding.context={n}"), SHAPES["7b"], LOAD).trainer_gpu_bytes
        for n in (1, 2, 8)
    )
    tokens = [
        estimate(recipe_of(*sets[:2], f"trainer.micro_batch_tokens={n}", *sets[3:]), SHAPES["7b"], LOAD)
        for n in (16384, 4096)
    ]
    shape, section = SHAPES["7b"], recipe_of(*sets).trainer
    # docs/recipes.md: 2 K T (b (n + 1) + 8), with n = 1 where all layers are computed again
    keys = 2 * shape.num_kv_heads * shape.head_size * 32768 * (2 * DTYPE_BYTES[section.compute_dtype] + 8)
    assert [half, one] == [each.trainer_gpu_bytes + keys for each in tokens]
    assert one < half < alone


def test_ref_log_probs_of_searchers_move_a_copy_from_the_trainer_to_each_of_them() -> None:
    here = estimate(recipe_of('objective.reference_placement="trainer"'), SHAPES["1b"], LOAD)
    there = estimate(recipe_of('objective.reference_placement="searcher"'), SHAPES["1b"], LOAD)
    num_params = SHAPES["1b"].num_params
    assert here.trainer_gpu_bytes - there.trainer_gpu_bytes == 4 * num_params  # float32
    assert there.searcher_gpu_bytes - here.searcher_gpu_bytes == 2 * num_params + 128 * 2**20  # bfloat16, logits
    # evaluations may ask for the same model, which is then held once
    both = recipe_of('objective.reference_placement="searcher"', "eval.kl_to_reference=true")
    assert estimate(both, SHAPES["1b"], LOAD).searcher_gpu_bytes == there.searcher_gpu_bytes


def test_the_command_prints_people_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sizing", str(ROOT / "recipes/math.toml"), "--model", "7b"]
    assert main(words) == 0
    assert "7.62B parameters" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"]["version_bytes"] == 2 * found["shape"]["num_params"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "13b"], "--model '13b' is not known; known are 1b, 7b, 32b"),
        (["--model", "1b", "--step-s", "0"], "--step-s is 0; it must be above 0"),
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


def test_a_maker_of_no_policy_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "recipes/gsm8k-tiny.toml").read_text().replace('maker = "llama"', 'maker = "bert_encoder"')
    (tmp_path / "recipe.toml").write_text(text.replace("models/tiny/llama", "models/none"))
    assert main(["sizing", str(tmp_path / "recipe.toml")]) == 2
    assert "the maker 'bert_encoder' makes no policy; the makers of policies are llama, " in capsys.readouterr().err


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
    command, _, filtered = command.partition(" | ")
    assert filtered in ("", "sed -n '/^GPUs/,$p'")
    assert main(shlex.split(command)) == 0
    found = capsys.readouterr().out
    assert (found[found.index("GPUs of") :] if filtered else found) == printed


def test_the_documented_sizes_and_layouts_are_there() -> None:
    sizes = [command.split()[3] for command, _ in BLOCKS if "--model" in command]
    assert sizes == ["1b", "7b", "32b"]
    # every recipe that names GPUs
    shown = {Path(command.split()[1]).name for command, _ in BLOCKS}
    assert shown == {path.name for path in (ROOT / "recipes").glob("*.toml") if "\n[local.gpus]" in path.read_text()}
