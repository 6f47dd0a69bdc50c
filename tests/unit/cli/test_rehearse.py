"""`tba rehearse`: the trace of each full recipe beside the formula, a real step beside its trace, the flow."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tba_buffer import rehearsal as flow_rehearsal
from tba_buffer.rehearsal import FlowRehearsal
from tba_buffer.rehearsal import Load as FlowLoad
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.learner.learner import Learner, trainer_rng
from tba_trainer.model.policy import load_policy
from tba_trainer.rehearsal import step as rehearsal
from tba_trainer.rehearsal.fake_device import cuda_branches
from tba_trainer.rehearsal.live_bytes import LiveBytes
from tba_trainer.rehearsal.step import StepBytes, StepPlan, rehearse_step, trace_step

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.main import main
from tba_cli.rehearsal.gpu import STORE_BYTES_PER_S, assumed_step_s, assumed_tokens_per_s, misfit
from tba_cli.rehearsal.schedules import odd_ends, points, totals
from tba_cli.sizing import CARD_GIB, GIB, Estimate, Load, ModelShape, estimate, shape_in_recipe, shape_of_folder
from tests.support.tiny_model import Architecture, make_tiny_model
from tests.support.trainer_values import make_recipe

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs/recipes.md").read_text()
GPU_BYTES = round(CARD_GIB * GIB)
ANY_LOAD = Load(prompt_tokens=1, response_tokens=1, step_s=1.0, num_searchers=1, concurrent_rollouts=1)
FORMULA_PER_TRACE = {
    "gsm8k": (1.0, 1.15),
    "math": (1.0, 1.1),
    "tldr": (1.2, 1.5),
    "tldr-1b": (1.0, 1.3),
    "tldr-2.8b": (1.0, 1.2),
    # the formula counts the one prompt of all rollouts once for each of them
    "redteam": (2.0, 4.0),
    "redteam-llama": (1.5, 3.0),
}
"""The formula of `tba sizing` is not below the trace, and not far above where prompts differ."""


def recipe_of(name: str, *sets: str) -> Recipe:
    return load_recipe(ROOT / f"recipes/{name}.toml", sets=list(sets), environ={})


def as_printed(found: StepBytes, plan: StepPlan) -> dict[str, Any]:
    return {"bytes": asdict(found), "state_bytes": found.state, "peak_bytes": found.peak, "plan": asdict(plan)}


@pytest.fixture(scope="module", autouse=True)
def shared_traces() -> Iterator[None]:
    """Trace each recipe with each number of layers once; without FSDP2 one layer less: the line is the same."""
    found: dict[tuple[str, int, str], StepBytes] = {}

    def trace(recipe: Recipe, config: Mapping[str, Any], *, num_layers: int) -> StepBytes:
        settings = (recipe.model.path, recipe.trainer.gradient_checkpointing, recipe.trainer.context)
        key = (recipe.run.name, num_layers, repr(settings))
        if key not in found:
            found[key] = trace_step(recipe, config, num_layers=num_layers)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "trace_step", trace)
        patch.setattr(rehearsal, "LAYERS", (1, 2))
        yield


@pytest.mark.parametrize("name", FORMULA_PER_TRACE)
def test_a_full_recipe_fits_and_the_formula_is_above_its_trace(name: str) -> None:
    recipe = recipe_of(name)
    shape, _ = shape_in_recipe(recipe.model.path, recipe)
    assert shape.config is not None
    found, plan = rehearse_step(recipe, shape.config)
    if recipe.model.lora is None:  # the sizes of the model that was traced are those of the table
        assert found.parameters * recipe.trainer.num_processes == pytest.approx(4 * shape.num_params, rel=1e-3)
    assert misfit(recipe, as_printed(found, plan), num_layers=shape.num_layers, gpu_bytes=GPU_BYTES) is None
    low, high = FORMULA_PER_TRACE[name]
    needs = estimate(recipe, shape, ANY_LOAD)
    assert low <= needs.trainer_gpu_bytes / found.peak <= high
    assert plan.num_rollouts == recipe.sampling.prompts_per_batch * recipe.sampling.group_size
    assert plan.max_tokens <= recipe.trainer.micro_batch_tokens
    # where it is missing, put this line there
    assert documented_row(name, recipe, shape, found, plan, needs) in DOCS.splitlines()


def documented_row(
    name: str, recipe: Recipe, shape: ModelShape, found: StepBytes, plan: StepPlan, needs: Estimate
) -> str:
    tokens = (recipe.searcher.max_prompt_tokens // 2) + (recipe.searcher.max_response_tokens // 2)
    step_s = assumed_step_s(recipe, shape, tokens_per_rollout=tokens)
    sizes = (found.state, found.forward_backward_peak, found.update_peak, needs.trainer_gpu_bytes)
    return (
        f"| `{name}` | {plan.num_micro_batches} | {plan.max_tokens:,} | "
        + " | ".join(f"{num_bytes / GIB:.1f}" for num_bytes in sizes)
        + f" | {needs.trainer_gpu_bytes / found.peak:.2f} | "
        f"{assumed_tokens_per_s(recipe, shape):,.0f} / {step_s:.2g} s | "
        f"{needs.version_bytes / STORE_BYTES_PER_S:.1f} of {recipe.trainer.sync_interval * step_s:.1f} s |"
    )


@pytest.mark.parametrize("num", [7, 9, 10])
def test_every_rollout_of_the_rehearsal_has_its_pass(num: int) -> None:
    """What is left of a group in the largest micro-batches may be one rollout: alone it would be tied."""
    recipe = recipe_of("quickstart", "objective.preset=kimi", f"trainer.micro_batch_tokens={13 * num}")
    groups = rehearsal._batch(recipe, vocab_size=16).groups
    assert sum(len(group.rollouts) for group in groups) == 2 * num
    assert all(len({rollout.reward for rollout in group.rollouts}) > 1 for group in groups)


def test_models_of_few_layers_are_extended_along_the_line() -> None:
    recipe = recipe_of("tldr")
    shape, _ = shape_in_recipe(recipe.model.path, recipe)
    assert shape.config is not None
    few = {**shape.config, "num_hidden_layers": 4}
    assert rehearse_step(recipe, few)[0] == trace_step(recipe, shape.config, num_layers=4)


def test_layers_of_two_kinds_are_extended_along_the_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of five layers keep their activations: the trace is that of the whole model, the formula 8 % above."""
    monkeypatch.setattr(rehearsal, "LAYERS", (2, 3))
    folder = make_tiny_model(tmp_path / "model", hidden_size=128, num_layers=5, vocab_size=512)
    recipe = make_recipe(
        folder,
        run={"name": "plane"},
        searcher={"max_prompt_tokens": 32, "max_response_tokens": 96},
        sampling={"prompts_per_batch": 4, "group_size": 4, "rollouts_per_visit": 4},
        trainer={"micro_batch_tokens": 512, "gradient_checkpointing": 3},
    )
    config = json.loads((folder / "config.json").read_text())
    found, _ = rehearse_step(recipe, config)
    assert found == rehearse_step(recipe, config, all_layers=True)[0]
    assert 1.0 <= estimate(recipe, shape_of_folder(folder), ANY_LOAD).trainer_gpu_bytes / found.peak <= 1.1


def test_a_tiny_model_of_two_processes_is_traced_to_its_last_tensor(tmp_path: Path) -> None:
    """All its tensors are smaller than those that are fake wherever they come from."""
    folder = make_tiny_model(tmp_path / "model", num_layers=1, vocab_size=64)
    recipe = make_recipe(folder, trainer={"num_processes": 2, "compute_dtype": "bfloat16", "micro_batch_tokens": 64})
    found, _ = rehearse_step(recipe, json.loads((folder / "config.json").read_text()))
    shape = shape_of_folder(folder)
    # rotary embeddings have buffers, too
    assert found.gradients == 4 * shape.num_params / 2
    assert found.parameters == pytest.approx(found.gradients, rel=1e-3)
    assert found.optimizer == 2 * found.gradients
    assert 1.0 <= estimate(recipe, shape, ANY_LOAD).trainer_gpu_bytes / found.peak <= 1.3


def test_processes_that_share_sequences_are_traced_and_planned_as_one(tmp_path: Path) -> None:
    """Each has the same state, and less of the activations; a group makes the passes that one process made."""
    folder = make_tiny_model(tmp_path / "model", num_layers=1, vocab_size=64)

    def traced(**settings: Any) -> tuple[StepBytes, StepPlan, int]:
        trainer = {"num_processes": 2, "micro_batch_tokens": 1024, "sharding": settings}
        recipe = make_recipe(folder, trainer=trainer, searcher={"max_response_tokens": 512})
        found = rehearse_step(recipe, json.loads((folder / "config.json").read_text()))
        return *found, estimate(recipe, shape_of_folder(folder), ANY_LOAD).trainer_gpu_bytes

    (alone, plan_alone, sized_alone), (shared, plan_shared, sized_shared) = traced(), traced(context=2)
    assert shared.state == alone.state
    assert shared.peak < 0.8 * alone.peak
    assert plan_shared.num_micro_batches == 2 * plan_alone.num_micro_batches
    assert sized_shared < sized_alone
    assert 1.0 <= sized_shared / shared.peak <= 2.0


def test_a_model_that_cannot_be_traced_gets_a_sentence() -> None:
    recipe = recipe_of("gsm8k-tiny")
    with pytest.raises(ConfigError, match=r"builds no language model .*\(model_type 'bogus'\)"):
        rehearse_step(recipe, {"model_type": "bogus", "num_hidden_layers": 1})
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3, "vocab_size": 64}
    with pytest.raises(ConfigError, match="'llama' cannot be traced on fake tensors"):
        rehearse_step(recipe, {"model_type": "llama", "num_hidden_layers": 1, **sizes})


def test_a_misfit_names_the_key_to_change() -> None:
    trace = {
        "state_bytes": 16 * GIB,
        "peak_bytes": 50 * GIB,
        "bytes": {"update_peak": 20 * GIB},
        "plan": {"max_tokens": 16_384},
    }

    def sentence(*sets: str, recipe: str = "gsm8k", gib: int = 40, max_tokens: int = 16_384) -> str:
        asked = trace | {"plan": {"max_tokens": max_tokens}}
        return str(misfit(recipe_of(recipe, *sets), asked, num_layers=24, gpu_bytes=gib * GIB))

    lower = "needs 50 GiB, and 36 of the 40 GiB of a GPU can be used; lower trainer.micro_batch_tokens from 16384 to"
    assert f"{lower} about 9637, and rehearse again" in sentence()  # 16,384 * 20 / 34
    assert "raise trainer.num_processes (it is 1), or train an adapter" in sentence(gib=16)
    for recomputed in ("false", "1", "23"):
        wanted = "set trainer.gradient_checkpointing = true"
        assert wanted in sentence(f"trainer.gradient_checkpointing={recomputed}")
    assert "a single rollout of 768 tokens is too long" in sentence(max_tokens=1000)
    assert sentence(gib=60) == "None"
    # what is set already is no advice
    assert lower in sentence("trainer.gradient_checkpointing=24")
    assert "take 20 GiB; raise trainer.num_processes (it is 1), and" in sentence("model.lora.rank=8", gib=16)
    for gib, max_tokens in ((16, 16_384), (40, 1000)):
        found = sentence("trainer.sharding.replicas=2", recipe="math", gib=gib, max_tokens=max_tokens)
        assert "lower trainer.sharding.replicas (it is 2) or raise trainer.num_processes (it is 4)" in found


@pytest.mark.parametrize(
    ("architecture", "num_tokens", "sections"),
    [
        ("llama", 128, {"trainer": {"gradient_checkpointing": True}}),
        ("qwen2", 128, {"trainer": {"gradient_checkpointing": 1}}),
        ("gpt_neox", 512, {"objective": {"preset": "tba_prime"}}),
        ("qwen2", 256, {"model": {"lora": {"rank": 4}}}),
    ],
)
def test_a_real_step_holds_what_its_trace_says(
    tmp_path: Path, architecture: Architecture, num_tokens: int, sections: dict[str, dict[str, Any]]
) -> None:
    tied = architecture == "qwen2"
    folder = make_tiny_model(
        tmp_path / "model", architecture=architecture, tied=tied, hidden_size=128, num_layers=2, vocab_size=4096
    )
    checkpointing = sections.get("trainer", {}).get("gradient_checkpointing", False)
    recipe = make_recipe(
        folder,
        **{
            **sections,
            "sampling": {"prompts_per_batch": 4, "group_size": 4, "rollouts_per_visit": 4},
            "searcher": {"max_prompt_tokens": num_tokens // 4, "max_response_tokens": num_tokens - num_tokens // 4},
            # in float32: a CPU keeps no wide sums of products in 16 bits
            "trainer": {"micro_batch_tokens": 4 * num_tokens, "gradient_checkpointing": checkpointing},
        },
    )
    config = json.loads((folder / "config.json").read_text())
    traced = trace_step(recipe, config, num_layers=2)
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=checkpointing)
    before = {id(value.untyped_storage()) for value in _tensors()}
    mine = {id(each.untyped_storage()) for each in [*model.parameters(), *model.buffers()]}

    def is_counted(tensor: torch.Tensor) -> bool:
        return id(tensor.untyped_storage()) in mine or id(tensor.untyped_storage()) not in before

    with cuda_branches(), LiveBytes(is_counted) as live:
        learner = Learner(model, recipe, trainer_rng(recipe))
        writer = WeightSnapshotWriter(model, recipe, folder=tmp_path)  # of the published copy with LoRA
        real = rehearsal.measured(learner, recipe, live)
        del writer
    assert real.forward_backward_peak == pytest.approx(traced.forward_backward_peak, rel=0.03)
    assert real.update_peak == pytest.approx(traced.update_peak, rel=0.01)


def _tensors() -> list[torch.Tensor]:
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def test_schedules_and_totals_of_the_run() -> None:
    recipe = recipe_of("gsm8k", "trainer.num_steps=400")
    first, *_, last = points(recipe)
    assert (first.step, last.step) == (1, 400)
    assert first.beta == pytest.approx(0.012)
    rate, beta = odd_ends(recipe)
    assert (
        rate
        == "trainer.learning_rate is a schedule of 1000 steps and the run has 400: it ends at 1e-05 and never reaches 0"
    )
    assert beta.startswith("objective.beta is a schedule of 500 steps")
    sums = totals(recipe, version_bytes=2, checkpoint_bytes=3)
    assert (sums.num_versions, sums.versions_bytes) == (201, 402)
    assert (sums.num_checkpoints, sums.checkpoints_bytes) == (4, 12)
    assert sums.num_visits_to_first_batch == 21  # 500 / 24


def flow_of(recipe: Recipe, **load: float) -> dict[str, Any]:
    usual = {"tokens_per_s": 4000.0, "step_s": 5.0, "bytes_per_s": 1e9, "response_tokens": 100.0}
    whole = {"version_bytes": 10**9, "num_prompts": 10**6, "num_steps": 20}
    return FlowRehearsal(recipe, FlowLoad(**{**usual, **whole, **load})).run()  # pyright: ignore[reportArgumentType]


LOW_BETA_FROM_STEP = {"gsm8k": (0.004, 501), "tldr": (0.05, 33), "tldr-1b": (0.05, 33), "tldr-2.8b": (0.05, 33)}
"""The published schedules of beta end before the run does."""


@pytest.mark.parametrize("name", FORMULA_PER_TRACE)
def test_a_full_recipe_flows_at_the_assumed_pace_and_its_schedules_end_where_it_does(name: str) -> None:
    """Versions are written before the next one is due, nobody waits for ever, and the trainer waits for nothing."""
    recipe = recipe_of(name)
    shape, _ = shape_in_recipe(recipe.model.path, recipe)
    tokens = (recipe.searcher.max_prompt_tokens // 2) + (recipe.searcher.max_response_tokens // 2)
    flow = flow_of(
        recipe,
        tokens_per_s=assumed_tokens_per_s(recipe, shape),
        step_s=assumed_step_s(recipe, shape, tokens_per_rollout=tokens),
        bytes_per_s=STORE_BYTES_PER_S,
        version_bytes=estimate(recipe, shape, ANY_LOAD).version_bytes,
        response_tokens=recipe.searcher.max_response_tokens // 2,
        num_prompts=1 if name.startswith("redteam") else 10**6,
    )
    assert flow["stalled_by"] is None
    assert 0 < flow["publish_s"] < flow["sync_s"]
    assert flow["trainer_wait_share"] < 0.01
    assert flow["num_steps"] > 1
    ends = [LOW_BETA_FROM_STEP[name]] if name in LOW_BETA_FROM_STEP else []
    assert list(odd_ends(recipe)) == [
        f"objective.beta has its final value {value} from step {step} on" for value, step in ends
    ]


def test_slow_searchers_make_the_trainer_wait_and_a_slow_store_makes_rollouts_old() -> None:
    recipe = recipe_of("gsm8k")
    usual = flow_of(recipe)
    assert usual["num_steps"] == 20
    assert usual["steps_per_hour"] == pytest.approx(720)
    assert usual["realised_m"] == pytest.approx(0.95, abs=0.05)
    # with flow control searchers cannot be outrun
    control = recipe_of("gsm8k", "sampling.samples_per_insert=1.0", "sampling.samples_per_insert_error=140")
    slow = flow_of(control, tokens_per_s=200.0)
    assert slow["trainer_wait_share"] > 0.5
    assert slow["trainer_waits_s"]["samples-per-insert"] > 0
    fast = flow_of(control)
    assert fast["slot_busy_share"] < 1
    assert flow_of(recipe, bytes_per_s=5e7)["policy_age_mean_steps"] > usual["policy_age_mean_steps"] + 1
    tight = flow_of(recipe_of("gsm8k", "buffer.max_policy_age_steps=1"), tokens_per_s=1000.0)
    assert tight["evicted_unused_share"] > 0.05
    assert tight["policy_age_max_steps"] <= 2  # a batch is drawn one step ahead


def test_the_flow_of_equal_lengths_is_what_a_pen_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # every slot decodes 10 tokens/s, so that a batch of 140 rollouts comes every 10 s
    monkeypatch.setattr(flow_rehearsal, "LENGTH_SIGMA", 0.0)
    sets = [
        "searcher.num_searchers=1",
        "searcher.num_slots=140",
        "sampling.prompts_per_batch=7",
        "sampling.group_size=20",
        "sampling.rollouts_per_visit=20",
        "sampling.min_size_to_sample=140",
        "trainer.sync_interval=1",
        "trainer.prefetch_batches=0",
    ]
    # the error margin is a batch: steps begin at 10, 15, 20, and then with each batch; the last one ends at 195 s
    bound = recipe_of("gsm8k", *sets, "sampling.samples_per_insert=1.0", "sampling.samples_per_insert_error=140")
    ratio = flow_of(bound, tokens_per_s=1400.0)
    assert ratio["steps_per_hour"] == pytest.approx(3600 * 20 / 185)
    assert ratio["trainer_waits_s"]["samples-per-insert"] == pytest.approx(17 * 5)
    # 10 s of generation, 5 of training, 1 to write the version and 1 to read it, in which nobody generates
    turns = recipe_of("gsm8k", *sets, "sampling.alternate=true", "sampling.samples_per_insert=1.0")
    alternate = flow_of(turns, tokens_per_s=1400.0)
    assert alternate["steps_per_hour"] == pytest.approx(3600 * 20 / (19 * 17 + 5))
    assert alternate["trainer_wait_share"] == pytest.approx(19 * 12 / (19 * 17 + 5))
    # versions take 12 s to write: step 19 waits for the place that version 15 leaves at 15 + 12 * 15 s
    slow_store = flow_of(recipe_of("gsm8k", *sets), tokens_per_s=1400.0, bytes_per_s=1e9 / 12)
    assert slow_store["steps_per_hour"] == pytest.approx(3600 * 20 / (15 + 12 * 15 + 5 - 10))
    assert slow_store["trainer_waits_s"]["unpublished-versions"] == pytest.approx(90)


def run_here(module: str, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a program in this process, which has torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *words])
        assert not importlib.import_module(module if module == "tba_buffer.rehearsal" else f"{module}.__main__").main()
    return capsys.readouterr().out


def test_the_command_prints_all_parts_and_refuses_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tba_cli.commands.rehearse.run_program", partial(run_here, capsys=capsys))
    recipe = str(ROOT / "recipes/gsm8k-tiny.toml")
    sets = ["--set", "trainer.micro_batch_tokens=100000", "--set", "sampling.prompts_per_batch=64"]
    assert main(["rehearse", recipe, "--steps", "3", "--gpu-memory-gib", "0.02", *sets]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("nothing here was measured; sizes of the model from ")
    assert "is below a longest rollout" not in printed
    assert "version takes longer" not in printed
    assert "(assumed: tokens/s, step, store, responses)" in printed
    assert "does not work: a trainer process needs " in printed
    assert "set trainer.gradient_checkpointing = true" in printed
    monkeypatch.setattr(flow_rehearsal, "MAX_ROLLOUTS", 200)
    assert main(["rehearse", recipe, *sets, "--set", "trainer.micro_batch_tokens=20", "--store-gib-per-s", "1e-6"]) == 0
    printed = capsys.readouterr().out
    assert "note: trainer.micro_batch_tokens (20) is below a longest rollout (112 tokens)" in printed
    assert "rollouts were generated by then; numbers of few steps say little: give --tokens-per-s" in printed
    assert "a version takes longer to write than the 2 step(s) until the next one" in printed
    assert main(["rehearse", recipe, "--step-s", "0"]) == 2
    assert "--step-s is 0; it must be above 0" in capsys.readouterr().err
    assert main(["rehearse", recipe, "--response-tokens", "500"]) == 2
    assert "it must not be above searcher.max_response_tokens" in capsys.readouterr().err
