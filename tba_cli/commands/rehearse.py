"""`tba rehearse`: a recipe without its model, its data or a GPU. The trainer's step is traced, the flow simulated."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.child_processes import run_program
from tba_cli.commands.config import EXIT_FAILED, in_range, size_text, starting_shape
from tba_cli.rehearsal.gpu import STORE_BYTES_PER_S, assumed_step_s, assumed_tokens_per_s, misfit
from tba_cli.rehearsal.schedules import odd_ends, points, totals
from tba_cli.resolve import with_absolute_paths
from tba_cli.sizing import CARD_GIB, GIB, USABLE_SHARE, Load, ModelShape, estimate

ANY_PROMPTS = 1_000_000
"""Prompts of a data set that is not here: so many that none is visited twice."""


def rehearse_command(args: argparse.Namespace) -> int:
    """Print the rehearsal of one recipe; return 1 if a process of the trainer does not fit on its GPU, or all wait.

    Raises:
        ConfigError: a number is out of range, or the model is not known.
    """
    recipe = load_recipe(args.recipe, sets=args.set)
    shape, source = starting_shape(args, recipe)
    if shape.config is None:
        raise ConfigError(
            f"{args.model or recipe.model.path} is not a decoder whose layers are known; name one, such as --model 7b"
        )
    load = _load(args, recipe, shape)
    gpu_gib = CARD_GIB if args.gpu_memory_gib is None else in_range("--gpu-memory-gib", args.gpu_memory_gib)
    needs = estimate(recipe, shape, load)
    flow_load = {
        "tokens_per_s": args.tokens_per_s or assumed_tokens_per_s(recipe, shape),
        "step_s": load.step_s,
        "bytes_per_s": GIB * args.store_gib_per_s if args.store_gib_per_s else STORE_BYTES_PER_S,
        "version_bytes": needs.version_bytes,
        "response_tokens": load.response_tokens,
        "num_prompts": _num_prompts(recipe),
        "num_steps": min(args.steps, recipe.trainer.num_steps),
    }
    trace, flow = _run(recipe, shape, flow_load, all_layers=args.all_layers)
    problem = misfit(recipe, trace, num_layers=shape.num_layers, gpu_bytes=round(gpu_gib * GIB))
    problems = [] if problem is None else [problem]
    if flow["stalled_by"] is not None:
        problems.append(
            f"after step {flow['num_steps']} trainer and searchers wait for each other: {flow['stalled_by']}"
        )
    document = {
        "model": source,
        "memory": trace | {"formula_bytes": needs.trainer_gpu_bytes, "gpu_bytes": round(gpu_gib * GIB)},
        "schedule": [asdict(point) for point in points(recipe)],
        "totals": asdict(totals(recipe, version_bytes=needs.version_bytes, checkpoint_bytes=needs.checkpoint_bytes)),
        "flow": {"load": flow_load, "assumed": _assumed(args), **flow},
        "notes": [*odd_ends(recipe), *_notes(recipe, flow)],
        "problems": problems,
    }
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(_lines(recipe, document, num_layers=shape.num_layers)))
    return EXIT_FAILED if problems else 0


def _notes(recipe: Recipe, flow: dict[str, Any]) -> Iterator[str]:
    searcher, section = recipe.searcher, recipe.trainer
    longest = searcher.max_prompt_tokens + searcher.max_response_tokens
    if section.micro_batch_tokens < longest:
        yield (
            f"trainer.micro_batch_tokens ({section.micro_batch_tokens}) is below a longest rollout ({longest} tokens), "
            "which then has a micro-batch of its own"
        )
    if flow["is_cut_short"]:
        yield (
            f"the flow ends after {flow['num_steps']} steps, because {flow['num_rollouts']:,} rollouts were generated "
            "by then; numbers of few steps say little: give --tokens-per-s the pace at which scored rollouts arrive"
        )
    if flow["publish_s"] > flow["sync_s"]:
        num_steps = math.ceil(section.sync_interval * flow["publish_s"] / flow["sync_s"])
        yield (
            f"a version takes longer to write than the {section.sync_interval} step(s) until the next one, and the "
            f"trainer waits for it; raise trainer.sync_interval to at least {num_steps}"
        )


def _load(args: argparse.Namespace, recipe: Recipe, shape: ModelShape) -> Load:
    for name in ("tokens_per_s", "step_s", "store_gib_per_s", "response_tokens", "steps"):
        if (value := getattr(args, name)) is not None:
            in_range(f"--{name.replace('_', '-')}", value)
    searcher = recipe.searcher
    if (args.response_tokens or 0) > searcher.max_response_tokens:
        raise ConfigError(
            f"--response-tokens is {args.response_tokens}; it must not be above searcher.max_response_tokens, which is "
            f"{searcher.max_response_tokens}"
        )
    # half of the limits, as `tba sizing` assumes
    prompt_tokens = max(1, searcher.max_prompt_tokens // 2)
    response_tokens = args.response_tokens or max(1, searcher.max_response_tokens // 2)
    return Load(
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        step_s=args.step_s or assumed_step_s(recipe, shape, tokens_per_rollout=prompt_tokens + response_tokens),
        num_searchers=searcher.num_searchers,
        concurrent_rollouts=searcher.num_slots,
    )


def _num_prompts(recipe: Recipe) -> int:
    data = recipe.data
    if data.generator is not None:
        return data.num_train
    return len(data.train.texts) if data.train is not None and data.train.texts else ANY_PROMPTS


def _assumed(args: argparse.Namespace) -> list[str]:
    """Return the fields of the load that nobody has given."""
    given = {"tokens_per_s": args.tokens_per_s, "step_s": args.step_s, "bytes_per_s": args.store_gib_per_s}
    return [name for name, value in {**given, "response_tokens": args.response_tokens}.items() if value is None]


def _run(recipe: Recipe, shape: ModelShape, load: dict[str, Any], *, all_layers: bool) -> tuple[Any, Any]:
    """Return what the programs of trainer and buffer print."""
    with tempfile.TemporaryDirectory(prefix="tba-rehearsal-") as folder:
        config, model = Path(folder) / "recipe.json", Path(folder) / "config.json"
        # the resolved recipe: the programs must not read the variables of this shell again
        config.write_text(with_absolute_paths(recipe).model_dump_json(), encoding="utf-8")
        model.write_text(json.dumps(shape.config), encoding="utf-8")
        words = ["--config", str(config)]
        more = ["--all-layers"] if all_layers else []
        trace = json.loads(run_program("tba_trainer.rehearsal", [*words, "--model", str(model), *more]))
        flow = json.loads(run_program("tba_buffer.rehearsal", [*words, "--load", json.dumps(load)]))
    return trace, flow


def _lines(recipe: Recipe, document: dict[str, Any], *, num_layers: int) -> Iterator[str]:
    yield f"nothing here was measured; sizes of the model from {document['model']}"
    yield from _memory_lines(document["memory"], num_layers=num_layers)
    yield "schedules (computed):"
    yield "  step    learning rate  beta       m      sampling temperature"
    for point in document["schedule"]:
        temperature = point["sampling_temperature"]
        mix = "drawn for each rollout" if temperature is None else f"{temperature:g}"
        yield (
            f"  {point['step']:<7} {point['learning_rate']:<14.4g} {point['beta']:<10.4g} "
            f"{point['most_on_policy_prob']:<6g} {mix}"
        )
    sums = document["totals"]
    yield (
        f"  {recipe.trainer.num_steps} steps train {sums['num_rollouts_trained']:,} rollouts; the first batch needs "
        f"{sums['num_visits_to_first_batch']} visits"
    )
    yield (
        f"  {sums['num_versions']} versions, {size_text(sums['versions_bytes'])} written; {sums['num_checkpoints']} "
        f"checkpoints, {size_text(sums['checkpoints_bytes'])}"
    )
    yield from _flow_lines(document["flow"])
    yield from (f"note: {note}" for note in document["notes"])
    yield from (f"does not work: {problem}" for problem in document["problems"])


def _memory_lines(memory: dict[str, Any], *, num_layers: int) -> Iterator[str]:
    parts, plan, peak = memory["bytes"], memory["plan"], memory["peak_bytes"]
    layers = " and ".join(map(str, memory["layers_traced"]))
    how = "in full" if memory["layers_traced"] == [num_layers] else f"with {layers} of its {num_layers} layers"
    yield f"memory of each trainer process (traced on fake tensors {how}, every rollout at its longest):"
    names = ("parameters", "reference", "published", "gradients", "optimizer")
    yield "  " + ", ".join(f"{name} {size_text(parts[name])}" for name in names)
    yield (
        f"  at most {size_text(parts['forward_backward_peak'])} while gradients are computed, "
        f"{size_text(parts['update_peak'])} while weights are updated"
    )
    yield (
        f"  peak {size_text(peak)} of {size_text(USABLE_SHARE * memory['gpu_bytes'])} that can be used; the formula of "
        f"tba sizing says {size_text(memory['formula_bytes'])}, {memory['formula_bytes'] / peak:.2f} times that"
    )
    yield (
        f"  {plan['num_rollouts']} rollouts a step in {plan['num_micro_batches']} micro-batch(es) of at most "
        f"{plan['max_tokens']:,} tokens on each process, {plan['num_first_passes']} of them after a first pass"
    )


def _flow_lines(flow: dict[str, Any]) -> Iterator[str]:
    load = flow["load"]
    names = {"tokens_per_s": "tokens/s", "step_s": "step", "bytes_per_s": "store", "response_tokens": "responses"}
    assumed = ", ".join(names[name] for name in flow["assumed"])
    yield (
        f"flow (simulated; the buffer's own code): {load['tokens_per_s']:,.0f} tokens/s of each searcher, "
        f"{load['step_s']:.3g} s a step, {load['bytes_per_s'] / GIB:g} GiB/s to and from the store, half of the "
        f"responses above {load['response_tokens']:g} tokens" + (f" (assumed: {assumed})" if assumed else "")
    )
    if not flow["num_steps"]:
        yield f"  no step: {flow['num_rollouts']:,} rollouts came first"
        return
    waits_s = flow["trainer_waits_s"]
    most = f" (most for {max(waits_s, key=waits_s.get)})" if any(waits_s.values()) else ""
    yield (
        f"  {flow['num_steps']} steps, the first after {flow['first_step_s']:.3g} s; {flow['steps_per_hour']:,.0f} "
        f"steps an hour; the trainer waits {flow['trainer_wait_share']:.0%} of the time{most}, slots are busy "
        f"{flow['slot_busy_share']:.0%}"
    )
    yield (
        f"  policy age {flow['policy_age_mean_steps']:.1f} steps on average, 95 % up to "
        f"{flow['policy_age_p95_steps']:.0f}, at most {flow['policy_age_max_steps']}; realised m "
        f"{flow['realised_m']:.2f}; {flow['evicted_unused_share']:.1%} of rollouts too old before any batch had them"
    )
    yield (
        f"  {flow['generated_per_trained']:.3g} rollouts come for each that is trained; a version takes "
        f"{flow['publish_s']:.3g} s to write and {flow['pull_s']:.3g} s to read; one is due every "
        f"{flow['sync_s']:.3g} s"
    )
