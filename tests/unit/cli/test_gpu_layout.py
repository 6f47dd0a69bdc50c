"""Who sits on which GPU, in the order of start, and whether it fits: computed, no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tba.config import Recipe, load_recipe
from tba.config.searcher import check_tensor_parallel
from tba.errors import ConfigError
from tba_cli.doctor.checks.machine import check_devices, check_gpu
from tba_cli.doctor.target import CheckResult, target_of
from tba_cli.main import main
from tba_cli.setup.origin import check_searchers
from tba_cli.sizing import (
    CARD_GIB,
    GIB,
    Card,
    ModelShape,
    gpu_layout,
    misfits,
    shape_in_recipe,
    simultaneous_starts,
    trainer_remedy,
    unknown_sizes,
)
from tba_cli.sizing.gpu_layout import Layout

ROOT = Path(__file__).parents[3]
FULL = ("gsm8k", "math", "tldr", "tldr-1b", "tldr-2.8b", "redteam", "redteam-llama")
SHARE = "searcher.vllm.gpu_memory_share"


def recipe_of(name: str, *sets: str) -> Recipe:
    folder = "tests/data/recipes" if name.endswith("-tiny") else "recipes"
    return load_recipe(ROOT / folder / f"{name}.toml", sets=list(sets), environ={})


def layout_of(recipe: Recipe) -> Layout:
    def shape_of(path: str) -> ModelShape:
        return shape_in_recipe(path, recipe)[0]

    return gpu_layout(recipe, shape_of)


def cards_of(layout: Layout, *, gib: float = CARD_GIB) -> Mapping[int, Card]:
    return dict.fromkeys(layout, Card.empty(round(gib * GIB)))


def problems(name: str, *sets: str, gib: float = CARD_GIB, certain: bool = False) -> list[str]:
    layout = layout_of(recipe_of(name, *sets))
    return list(misfits(layout, cards_of(layout, gib=gib), certain=certain))


@pytest.mark.parametrize("name", FULL)
def test_every_full_recipe_fits_on_80_gb_cards(name: str) -> None:
    recipe = recipe_of(name)
    layout = layout_of(recipe)
    assert not unknown_sizes(layout)
    assert not list(misfits(layout, cards_of(layout)))
    assert not list(simultaneous_starts(layout))


def test_the_order_is_that_of_the_start() -> None:
    layout = layout_of(recipe_of("tldr", "local.gpus.trainer=[3]"))
    assert [one.who for one in layout[3] if "CUDA context" not in one.who] == [
        "reward model pythia410m-rm-tldr6.9b",
        "reward model pythia6.9b-gold-tldr",
        "trainer",
        "starting model of a searcher",
        "vLLM of a searcher",
    ]
    assert [one.who for one in layout[1]] == ["starting model of a searcher", "vLLM of a searcher"]
    gold = layout[3][3]
    assert gold.fixed_bytes == 2 * 6_857_302_016  # bfloat16


def test_a_wrong_share_is_refused_with_the_one_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # what `python -m tba_trainer.memory_trace` prints for this recipe
    parts = dict.fromkeys(("parameters", "reference", "published", "gradients", "optimizer"), 0)
    parts |= {"forward_backward_peak": 49 * GIB, "update_peak": 46 * GIB}
    trace = {"bytes": parts, "state_bytes": 46 * GIB, "peak_bytes": 49 * GIB, "max_tokens": 12_800}
    printed = json.dumps({**trace, "layers_traced": [2, 3]})
    monkeypatch.setattr("tba_cli.commands.sizing.run_program", lambda module, words: printed)
    words = ["sizing", str(ROOT / "recipes/tldr-2.8b.toml")]
    assert main([*words, "--set", f"{SHARE}=0.9"]) == 1
    out = capsys.readouterr().out
    assert f"does not fit: GPU 3: vLLM of a searcher takes {SHARE} = 0.9 of 79.0, 71.1 GiB, and finds " in out
    highest = out.rstrip().rpartition(f"set {SHARE} to at most ")[2]
    assert main([*words, "--set", f"{SHARE}={highest}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"]["3"][-1]["share"] == float(highest)
    assert main([*words, "--set", f"{SHARE}={float(highest) + 0.01:.2f}"]) == 1


def test_a_share_without_room_for_a_rollout_is_too_small() -> None:
    (sentence,) = problems("tldr-2.8b", f"{SHARE}=0.05")
    assert "may take" in sentence
    least = sentence.rpartition(f"set {SHARE} to at least ")[2]
    assert problems("tldr-2.8b", f"{SHARE}={least}") == []
    # vLLM does not keep within its share where the size of its cache is given
    assert problems("tldr-2.8b", f"{SHARE}=0.05", "searcher.vllm.kv_cache_bytes=1000000000") == []


def test_keys_and_values_in_8_bits_need_less_memory() -> None:
    def least_bytes(dtype: str) -> int:
        layout = layout_of(recipe_of("tldr-2.8b", f"searcher.vllm.kv_cache_dtype={dtype}"))
        return next(each.peak_bytes for gpu in layout.values() for each in gpu if each.who == "vLLM of a searcher")

    # the rest are the weights and vLLM's own work space
    recipe = recipe_of("tldr-2.8b")
    shape, section = shape_in_recipe(recipe.model.path, recipe)[0], recipe.searcher
    num_tokens = section.max_prompt_tokens + section.max_response_tokens
    assert least_bytes("auto") - least_bytes("fp8_e4m3") == num_tokens * shape.kv_values_per_token  # a byte of each


def test_two_engines_on_a_gpu_share_what_is_left() -> None:
    on_one = "local.gpus.searchers=[[1],[1],[2]]"
    (sentence,) = problems("gsm8k", on_one, f"{SHARE}=0.5")
    assert sentence.startswith("GPU 1: vLLM of a searcher takes")
    highest = sentence.rpartition(" at most ")[2]
    assert float(highest) < 0.5
    assert problems("gsm8k", on_one, f"{SHARE}={highest}") == []
    layout = layout_of(recipe_of("gsm8k", on_one, f"{SHARE}={highest}"))
    assert [sentence[:6] for sentence in simultaneous_starts(layout)] == ["GPU 1:"]


def test_the_ranks_of_a_searcher_share_its_model() -> None:
    gpus = ["local.gpus.searchers=[[4,5],[6,7]]", "searcher.num_searchers=2"]
    recipe = recipe_of("math", *gpus, "searcher.tensor_parallel_size=2")
    layout = layout_of(recipe)
    assert list(simultaneous_starts(layout)) == []
    assert list(misfits(layout, cards_of(layout))) == []
    (alone,) = [one for one in layout_of(recipe_of("math", *gpus))[4] if one.share is not None]
    for number in (4, 5, 6, 7):
        (rank,) = [one for one in layout[number] if one.share is not None]
        assert rank.who == "vLLM of a searcher, one of 2 ranks"
        assert rank.fixed_bytes == alone.fixed_bytes // 2
        # 4 key-value heads, two for each rank
        assert (rank.peak_bytes - 2 * GIB) * 2 == alone.peak_bytes - 2 * GIB
    for sets, text in (
        ([*gpus, "searcher.tensor_parallel_size=3"], "local.gpus.searchers has a list of 2 GPUs"),
        (["local.gpus.searchers=[[4,5,6]]", "searcher.tensor_parallel_size=3"], "cannot share the 28 attention heads"),
        (["searcher.engine='embedded'", "searcher.tensor_parallel_size=2"], "only vllm splits a model"),
        (["searcher.pipeline_parallel_size=2"], "a searcher splits tensors, not layers"),
        (["searcher.data_parallel_size=2"], "several copies of a model are several searchers"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            layout_of(recipe_of("math", *sets))
    check_tensor_parallel({"num_attention_heads": 8, "intermediate_size": [16, 24]}, 1)  # a size for each layer


def test_sizes_that_are_not_known_are_said() -> None:
    path = "reward.tasks.tldr.scorers.0.model"
    unknown = unknown_sizes(layout_of(recipe_of("tldr", f"{path}=some/model")))
    assert unknown == {"reward model model": "some/model is not here, and 'model' is in no table of known models"}


def test_a_trainer_that_does_not_fit_names_the_key_to_change() -> None:
    sizes = {"state_bytes": 16 * GIB, "peak_bytes": 50 * GIB, "bytes": {"update_peak": 20 * GIB}}

    def sentence(*sets: str, recipe: str = "gsm8k", gib: int = 40, max_tokens: int = 16_384) -> str:
        trace = {**sizes, "max_tokens": max_tokens}
        return str(trainer_remedy(recipe_of(recipe, *sets), trace, num_layers=24, gpu_bytes=gib * GIB))

    lower = "needs 50.0 GiB, and 36.0 of the 40.0 GiB of a GPU can be used; lower trainer.micro_batch_tokens from 16384"
    assert f"{lower} to about 9637, and ask again" in sentence()  # 16,384 * 20 / 34
    assert "raise trainer.num_processes (it is 1), or train an adapter" in sentence(gib=16)
    for recomputed in ("false", "1", "23"):
        wanted = "set trainer.gradient_checkpointing = true"
        assert wanted in sentence(f"trainer.gradient_checkpointing={recomputed}")
    assert "a single rollout of 768 tokens is too long" in sentence(max_tokens=1000)
    assert sentence(gib=60) == "None"
    # what is set already is no advice
    assert lower in sentence("trainer.gradient_checkpointing=24")
    assert "take 20.0 GiB; raise trainer.num_processes (it is 1), and" in sentence("model.lora.rank=8", gib=16)
    for gib, max_tokens in ((16, 16_384), (40, 1000)):
        found = sentence("trainer.sharding.replicas=2", recipe="math", gib=gib, max_tokens=max_tokens)
        assert "lower trainer.sharding.replicas (it is 2) or raise trainer.num_processes (it is 4)" in found


def test_a_device_that_its_process_does_not_see_is_a_sentence() -> None:
    recipe = recipe_of("tldr", 'reward.tasks.tldr.scorers.0.device="cuda:1"')
    with pytest.raises(ConfigError, match=r"scorers\.0\.device 'cuda:1' is GPU 1 .* local.gpus gives it 1 "):
        layout_of(recipe)
    with pytest.raises(ConfigError, match=r"trainer\.device 'cuda:x' is no device"):
        layout_of(recipe_of("tldr", "trainer.device=cuda:x"))
    assert layout_of(recipe_of("tldr-tiny")) == {}  # scorers on `auto`, and nothing that asks for a GPU


def test_a_server_has_the_model_of_a_searcher_that_uses_one() -> None:
    recipe = recipe_of("gsm8k", "searcher.engine=openai", "searcher.openai.url=http://localhost:8000")
    found = [occupant.who for card in layout_of(recipe).values() for occupant in card if "searcher" in occupant.who]
    assert set(found) <= {"starting model of a searcher"}
    with pytest.raises(ConfigError, match="each needs one of its own"):
        check_searchers(recipe)


def test_the_real_cards_decide_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def see(*, free_gib: float, total_gib: float) -> None:
        gpus = [["a GPU", round(free_gib * GIB), round(total_gib * GIB)]] * 4
        answer = {"torch": "2", "cuda": "13", "usable": True, "gpus": gpus, "refused": {}}
        monkeypatch.setattr("tba_cli.doctor.checks.machine._ask_torch", lambda devices=(): answer)

    def look(recipe: Recipe, *, service: str | None = None) -> list[CheckResult]:
        return [result for result in check_gpu(target_of(recipe, service=service)) if result.code == "gpu-memory"]

    recipe = recipe_of("tldr-2.8b")
    see(free_gib=79, total_gib=79)
    check_devices(recipe)
    assert [result.level for result in look(recipe)] == ["ok"]
    # what else is on the GPUs leaves too little: vLLM would refuse to start
    see(free_gib=30, total_gib=79)
    with pytest.raises(ConfigError, match=r"GPU 0: trainer needs .*; .*") as caught:
        check_devices(recipe)
    assert "`tba sizing RECIPE`" in str(caught.value)
    assert {result.level for result in look(recipe)} == {"warn"}  # it may be this run itself
    # too small whoever is on them
    see(free_gib=40, total_gib=40)
    assert {result.level for result in look(recipe)} == {"fail"}
    # the container of a searcher has a card of its own, with nobody else on it
    deployed = recipe_of("tldr-2.8b", 'buffer.url="http://buffer:8700"')
    (result,) = look(deployed, service="searcher")
    assert (result.level, result.found) == ("ok", "what the recipe puts on GPU 0 fits there, as computed")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is an extra")
def test_vllm_still_compares_free_memory_with_its_share_of_the_total() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "v1/worker/utils.py").read_text()
    rule = text[text.index("def request_memory(") :]
    assert "init_snapshot.total_memory * cache_config.gpu_memory_utilization" in rule
    assert "if init_snapshot.free_memory < requested_memory:" in rule
