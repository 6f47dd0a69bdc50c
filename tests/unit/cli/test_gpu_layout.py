"""Who sits on which GPU, in the order of start, and whether it fits: computed, no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tba.config import Recipe, load_recipe
from tba.config.searcher import check_tensor_parallel
from tba.errors import ConfigError
from tba_cli.commands import sizing
from tba_cli.doctor.checks.machine import check_devices
from tba_cli.main import main
from tba_cli.setup.origin import check_searchers
from tba_cli.sizing.gpu_layout import CARD_GIB, GIB, Layout, gpu_layout, misfits
from tests.support.model_shapes import SHAPES

ROOT = Path(__file__).parents[3]
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
    assert [one.who for one in layout[3] if "CUDA context" not in one.who] == [
        "reward model pythia410m-rm-tldr6.9b",
        "reward model pythia6.9b-gold-tldr",
        "trainer",
        "starting model of a searcher",
        "vLLM of a searcher",
    ]
    assert [one.who for one in layout[1]] == ["starting model of a searcher", "vLLM of a searcher"]
    assert layout[3][3].bytes_on(CARD_BYTES) > 2 * 6_857_302_016  # bfloat16


def test_a_share_beside_others_is_a_misfit(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # what `python -m tba_trainer.memory_trace` prints for this recipe
    parts = dict.fromkeys(("parameters", "reference", "published", "gradients", "optimizer"), 0)
    trace = {"bytes": {**parts, "forward_backward_peak": 49 * GIB}, "state_bytes": 46 * GIB, "peak_bytes": 49 * GIB}
    printed = json.dumps({**trace, "max_tokens": 12_800, "layers_traced": [2, 3]})
    monkeypatch.setattr(sizing, "run_program", lambda module, words: printed)
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
        monkeypatch.setattr("tba_cli.doctor.checks.machine._ask_torch", lambda devices=(): answer)

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
