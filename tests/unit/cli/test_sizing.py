"""`tba sizing`: estimates beside what is really written and held, and who sits on which GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.learner.learner import Optimizer
from tba_trainer.memory_trace import __main__ as memory_trace
from tba_trainer.model.policy import load_policy

from tba.cgroups import core_limits
from tba.config import Recipe, load_recipe, parse_recipe
from tba.config.searcher import check_tensor_parallel
from tba.errors import ConfigError
from tba.wire import VersionSpan, encode_rollout
from tba_cli import child_processes
from tba_cli.commands import sizing
from tba_cli.doctor.checks.machine import check_devices
from tba_cli.main import main
from tba_cli.setup.origin import check_searchers
from tba_cli.sizing import machine
from tba_cli.sizing.estimate import estimate
from tba_cli.sizing.gpu_layout import CARD_GIB, GIB, Layout, gpu_layout, misfits
from tba_cli.sizing.machine import Machine, cpu_machine, with_machine_defaults
from tba_cli.sizing.model_shape import shape_of_folder
from tests.support.model_shapes import QWEN_7B, SHAPES
from tests.support.rollout_values import replace
from tests.support.tiny_model import make_tiny_model
from tests.support.wire_values import scored_rollout

ROOT = Path(__file__).parents[3]


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
    recipe = recipe_of("gsm8k", "searcher.max_prompt_tokens=20", f"searcher.max_response_tokens={num_tokens}")
    assert estimate(recipe, QWEN_7B).rollout_bytes == pytest.approx(len(encode_rollout(rollout)), rel=0.1)


def test_weights_gradients_and_moments_take_what_is_estimated(model: Path) -> None:
    section = recipe_of("gsm8k", f"model.path={json.dumps(str(model))}").model
    policy = load_policy(section, device="cpu", gradient_checkpointing=False)
    trainer = recipe_of("gsm8k").trainer
    optimizer = Optimizer(policy, trainer)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in policy.parameters())
    optimizer.apply(learning_rate=1e-4)
    held = sum(p.numel() * p.element_size() for p in policy.parameters())
    state = optimizer.state_tensors()
    moments = sum(t.numel() * t.element_size() for name, t in state.items() if not name.startswith("step."))
    shape = shape_of_folder(model)
    assert estimate(recipe_of("gsm8k"), shape).checkpoint_bytes == held + moments
    assert gradients == held


def test_versions_of_an_adapter_are_small_and_the_starting_model_is_whole() -> None:
    lora, full = estimate(recipe_of("gsm8k", "model.lora.rank=16"), QWEN_7B), estimate(recipe_of("gsm8k"), QWEN_7B)
    assert full.version_bytes == 2 * QWEN_7B.num_params
    assert lora.version_bytes < full.version_bytes / 40
    assert lora.store_bytes - lora.version_bytes > full.version_bytes


def test_the_command_traces_the_step_and_prints_people_and_json(capsys, monkeypatch) -> None:
    words = ["sizing", str(ROOT / "recipes/quickstart.toml")]
    traced: list[str] = []
    run = child_processes.run_program
    monkeypatch.setattr(child_processes, "run_program", lambda *given: traced.append(run(*given)) or traced[0])
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "0.000132B parameters; 1 trainer process(es)" in printed
    assert "peak of a step; traced on fake tensors with 2 of 2 layers" in printed
    monkeypatch.setattr(child_processes, "run_program", lambda *_: traced[0])
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
def test_bad_input_is_a_sentence(recipe: str, words: list[str], sentence: str, capsys) -> None:
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
def test_the_documented_estimates_are_what_the_command_prints(command: str, printed: str, capsys, monkeypatch) -> None:
    def trace_here(module: str, words: list[str]) -> str:
        """The program in this process, which has imported torch."""
        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            patch.setattr("sys.argv", [module, *words])
            assert memory_trace.main() == 0
        return out.getvalue()

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sizing, "_shape_in", lambda recipe, path: SHAPES[path])
    monkeypatch.setattr(child_processes, "run_program", trace_here)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed


FULL = ("gsm8k", "math", "tldr", "tldr-1b", "tldr-2.8b", "redteam", "redteam-llama")
SHARE = "searcher.vllm.gpu_memory_share"
CARD_BYTES = round(CARD_GIB * GIB)


def recipe_of(name: str, *sets: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.toml", sets=list(sets), environ={})


def layout_of(name: str, *sets: str) -> Layout:
    return gpu_layout(recipe_of(name, *sets), SHAPES.__getitem__, trainer_peak_bytes=50 * GIB)


@pytest.mark.parametrize("name", FULL)
def test_every_full_recipe_fits_on_80_gb_cards(name: str) -> None:
    assert list(misfits(layout_of(name), CARD_BYTES)) == []


def test_the_order_is_that_of_the_start() -> None:
    layout = layout_of("tldr", "local.gpus.trainer=[3]")
    first = ["reward model pythia410m-rm-tldr6.9b", "reward model pythia6.9b-gold-tldr", "trainer"]
    searcher = ["starting model of a searcher", "vLLM of a searcher"]
    assert [one.who for one in layout[3] if "CUDA context" not in one.who] == first + searcher
    assert [one.who for one in layout[1]] == searcher
    assert layout[3][3].bytes_on(CARD_BYTES) > 2 * 6_857_302_016  # bfloat16


def test_a_share_beside_others_is_a_misfit(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # what `python -m tba_trainer.memory_trace` prints for this recipe
    parts = dict.fromkeys(("parameters", "reference", "published", "gradients", "optimizer"), 0)
    trace = {"bytes": {**parts, "forward_backward_peak": 49 * GIB}, "state_bytes": 46 * GIB, "peak_bytes": 49 * GIB}
    printed = json.dumps({**trace, "max_tokens": 12_800, "layers_traced": [2, 3]})
    monkeypatch.setattr(child_processes, "run_program", lambda module, words: printed)
    monkeypatch.setattr(sizing, "_shape_in", lambda recipe, path: SHAPES[path])
    words = ["sizing", str(ROOT / "recipes/tldr-2.8b.toml")]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert main([*words, "--set", f"{SHARE}=0.9"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"does not fit: GPU 3: .*vLLM of a searcher need \d+\.\d of 79\.0 GiB; lower", out)


def test_vllm_needs_room_for_a_rollout() -> None:
    layout = layout_of("tldr-2.8b")
    least = next(one.peak_bytes for gpu in layout.values() for one in gpu if one.share is not None)
    section, shape = recipe_of("tldr-2.8b").searcher, SHAPES["models/pythia2.8b-sft-tldr"]
    num_tokens = section.max_prompt_tokens + section.max_response_tokens
    assert least == 2 * GIB + 2 * shape.num_params + 2 * num_tokens * shape.kv_values_per_token


def test_the_ranks_of_a_searcher_share_its_model() -> None:
    gpus = ["local.gpus.searchers=[[4,5],[6,7]]", "searcher.num_searchers=2"]
    layout = layout_of("math", *gpus, "searcher.tensor_parallel_size=2")
    assert list(misfits(layout, CARD_BYTES)) == []
    (alone,) = [one for one in layout_of("math", *gpus)[4] if one.share is not None]
    for number in (4, 5, 6, 7):
        (rank,) = [one for one in layout[number] if one.share is not None]
        assert rank.who == "vLLM of a searcher, one of 2 ranks"
        # half of the weights, and of 4 key-value heads two for each rank
        assert (rank.peak_bytes - 2 * GIB) * 2 == alone.peak_bytes - 2 * GIB
    for sets, text in (
        ([*gpus, "searcher.tensor_parallel_size=3"], "local.gpus.searchers has a list of 2 GPUs"),
        (["local.gpus.searchers=[[4,5,6]]", "searcher.tensor_parallel_size=3"], "cannot share the 28 attention heads"),
        (["searcher.engine='embedded'", "searcher.tensor_parallel_size=2"], "only vllm splits a model"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            layout_of("math", *sets)
    check_tensor_parallel({"num_attention_heads": 8, "intermediate_size": [16, 24]}, 1)  # a size for each layer


def test_a_device_that_its_process_does_not_see_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"scorers\.0\.device 'cuda:1' is GPU 1 .* local.gpus gives it 1 "):
        layout_of("tldr", 'reward.tasks.tldr.scorers.0.device="cuda:1"')
    with pytest.raises(ConfigError, match=r"trainer\.device 'cuda:x' is no device"):
        layout_of("tldr", "trainer.device=cuda:x")
    on_cpu = ("trainer.device=cpu", "searcher.device=cpu", "local.gpus={}")
    assert layout_of("tldr", *on_cpu) == {}  # scorers on `auto`, and nothing that asks for a GPU


def test_a_server_has_the_model_of_a_searcher_that_uses_one() -> None:
    sets = ("searcher.engine=openai", "searcher.openai.url=http://localhost:8000")
    found = [occupant.who for card in layout_of("gsm8k", *sets).values() for occupant in card]
    assert {who for who in found if "searcher" in who} <= {"starting model of a searcher"}
    with pytest.raises(ConfigError, match="each needs one of its own"):
        check_searchers(recipe_of("gsm8k", *sets))


def test_a_gpu_that_the_machine_lacks_is_found_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def see(num_gpus: int) -> None:
        gpus = [["a GPU", 79 * GIB, 79 * GIB]] * num_gpus
        answer = {"torch": "2", "cuda": "13", "usable": True, "gpus": gpus, "refused": {}}
        monkeypatch.setattr("tba_cli.doctor.checks.machine.ask_torch", lambda devices=(): answer)

    see(4)
    check_devices(recipe_of("tldr-2.8b"))
    see(3)
    with pytest.raises(ConfigError, match=r"local\.gpus names GPU 3, and this machine has 3"):
        check_devices(recipe_of("tldr-2.8b"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is an extra")
def test_vllm_still_compares_free_memory_with_its_share_of_the_total() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "v1/worker/utils.py").read_text()
    rule = text[text.index("def request_memory(") :]
    assert "init_snapshot.total_memory * cache_config.gpu_memory_utilization" in rule
    assert "if init_snapshot.free_memory < requested_memory:" in rule


ON_CPU = {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"generator": "addition"}}


def chosen(num_cores: int, **sections: dict[str, object]) -> tuple[Recipe, str | None]:
    return with_machine_defaults(parse_recipe({**ON_CPU, **sections}, where="test"), Machine(num_cores, 8 * GIB))


def test_what_a_recipe_leaves_open_is_chosen_by_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    for num_cores, num_searchers, num_threads in ((1, 1, 1), (2, 1, 1), (7, 3, 3), (64, 4, 32)):
        recipe, line = chosen(num_cores, sampling={"prompts_per_batch": 5})
        assert (recipe.searcher.num_searchers, recipe.trainer.torch_num_threads) == (num_searchers, num_threads)
        assert recipe.searcher.num_slots == -(-40 // num_searchers)
        assert (recipe.sampling.samples_per_insert, recipe.sampling.samples_per_insert_error) == (1.0, 40.0)
    assert line == (
        "this machine: 64 cores, no GPU: searcher.num_searchers = 4, searcher.num_slots = 10, "
        "sampling.samples_per_insert = 1, sampling.samples_per_insert_error = 40, trainer.torch_num_threads = 32"
    )
    (tmp_path / "nvidia0").touch()
    assert "64 cores, a GPU that trainer.device and searcher.device leave idle:" in str(chosen(64)[1])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"searcher": {"num_searchers": 2}}, "num_slots = 64, samples_per_insert = 1, samples_per_insert_error = 128"),
        ({"searcher": {"num_searchers": 0}}, None),
        ({"searcher": {"engine": "simulated"}}, None),
        ({"sampling": {"samples_per_insert": None}}, "num_searchers = 1, num_slots = 64"),
        ({"sampling": {"alternate": True}}, "num_searchers = 1, num_slots = 64"),
        ({"searcher": {"device": "cuda"}}, "num_searchers = 1"),
        ({"searcher": {"device": "cuda"}, "local": {"gpus": {"searchers": [[1], [2]]}}}, "num_searchers = 2"),
    ],
)
def test_what_a_recipe_says_is_not_chosen(sections: dict[str, dict[str, object]], said: str | None) -> None:
    recipe, line = chosen(2, **sections, trainer={"torch_num_threads": 3})
    assert said == (line and re.sub(r"\w+\.(\w+ =)", r"\1", line.rpartition(": ")[2]))
    assert recipe.trainer.torch_num_threads == 3


def test_recipes_that_are_shipped_leave_nothing_open_on_a_cpu() -> None:
    for path in (*(ROOT / "recipes").glob("*.toml"), *(ROOT / "examples/worlds").rglob("*.toml")):
        recipe = load_recipe(path, environ={})
        left_open = with_machine_defaults(recipe, Machine(64, 8 * GIB))[1]
        assert left_open is None, f"{path.name}: {left_open}"


def test_bfloat16_is_slow_on_a_processor_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CPU_INFO", info := tmp_path / "cpuinfo")
    for flags, is_said in (("avx512_bf16", False), ("avx512f", True)):
        info.write_text(flags)
        assert ("model.dtype to float32" in str(machine.bfloat16_warning(recipe_of("smollm2")))) is is_said


def test_cores_and_memory_are_those_of_the_groups_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("5:cpu,cpuacct:/old\n4:memory:/old\n0::/pod/container\n")
    for name, text in {
        "pod/container/cpu.max": "max 100000",
        "pod/cpu.max": "150000 100000",
        "cpu/old/cpu.cfs_quota_us": "-1",
        "cpu/old/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert sorted(core_limits(proc=tmp_path, cgroups=tmp_path)) == [0.5, 1.5]
    monkeypatch.setattr(machine, "core_limits", lambda: [1.5, 0.5])
    monkeypatch.setattr(machine, "memory_limits", lambda: [(tmp_path, 2**30), (tmp_path, 2**62)])
    assert cpu_machine() == Machine(1, 2**30)
