"""`tba config check|show|schema` and `tba sizing`: what a recipe says, and what it needs. Nothing is started."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.config import Recipe, load_recipe
from tba.config.trainer import STAGING_FREE_SHARE
from tba.errors import ConfigError
from tba.tls import with_bare_urls
from tba_cli.artifacts.huggingface import shape_on_hub
from tba_cli.sizing import (
    CARD_GIB,
    GIB,
    SHAPES,
    Card,
    Estimate,
    Load,
    LoopCost,
    ModelShape,
    estimate,
    gpu_layout,
    idle_gpus,
    known_shape,
    layout_lines,
    loop_costs,
    misfits,
    other_recomputation,
    preemptions,
    shape_in_recipe,
    simultaneous_starts,
    unknown_sizes,
)

EXIT_FAILED = 1


def check_command(args: argparse.Namespace) -> int:
    """Load the recipe, then check everything that it names as the run will use it; return 1 if something would fail."""
    from tba_cli.commands.doctor import print_result, results_json
    from tba_cli.doctor.checks.recipe import RecipeChecks
    from tba_cli.doctor.run_checks import run_checks
    from tba_cli.doctor.target import target_of
    from tba_cli.resolve import with_absolute_paths

    recipe = with_absolute_paths(load_recipe(args.recipe, sets=args.set))
    target = target_of(recipe, service=None)
    try_scorers = None
    if importlib.util.find_spec("tba_cli.local") is not None:  # no image holds the launcher
        from tba_cli.local.reward_trial import try_scorers
    checks = RecipeChecks(recipe, offline=args.offline, full=args.full, try_scorers=try_scorers, file=Path(args.recipe))
    results = []
    on_result = (lambda result: None) if args.json else print_result
    # the prompts come first: the checks of tokenizer and scorers need them
    for group in (checks.first(), checks.others()):
        results += run_checks(target, checks=group, timeout_s=checks.timeout_s, on_result=on_result)
    num_wrong = sum(result.level == "fail" for result in results)
    if args.json:
        print(results_json(results))
        return EXIT_FAILED if num_wrong else 0
    if num_wrong:
        things = "1 thing" if num_wrong == 1 else f"{num_wrong} things"
        print(f"{args.recipe}: {things} would fail; each line above says what to do")
        return EXIT_FAILED
    # skipped is not passed: the line says that something was not looked at
    num_left = sum(result.level == "skip" for result in results)
    left = f"; not checked: {num_left} {'thing' if num_left == 1 else 'things'}" if num_left else ""
    print(f"{args.recipe}: ok (run {recipe.run.name!r}, {recipe.trainer.num_steps} steps){left}")
    return 0


def show_command(args: argparse.Namespace) -> int:
    """Print every value that results from the recipe, the environment and the flags, defaults included; URLs without
    passwords."""
    document = load_recipe(args.recipe, sets=args.set).model_dump(mode="json")
    print(json.dumps(with_bare_urls(document), indent=2))
    return 0


def schema_command(args: argparse.Namespace) -> int:
    """Print the JSON schema of a recipe; editors and the Helm chart read it."""
    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0


def sizing_command(args: argparse.Namespace) -> int:
    """Print the estimate of one recipe; return 1 if somebody finds too little memory on a GPU.

    Raises:
        ConfigError: a number is out of range, or the sizes of the model are not known.
    """
    recipe = load_recipe(args.recipe, sets=args.set)
    shape, source = starting_shape(args, recipe)
    load = _load(args, recipe)
    found = estimate(recipe, shape, load)
    costs = loop_costs(recipe, shape, found, load, disk_bytes_per_s=in_range("--disk-gb-s", args.disk_gb_s) * 1e9)

    @functools.cache
    def shape_of(path: str) -> ModelShape:
        # --model stands for the starting model alone
        return shape if path == recipe.model.path else shape_in_recipe(path, recipe, ask_hub=shape_on_hub)[0]

    card_gib = CARD_GIB if args.gpu_memory_gib is None else in_range("--gpu-memory-gib", args.gpu_memory_gib)
    layout, card = gpu_layout(recipe, shape_of), Card.empty(round(card_gib * GIB))
    cards = dict.fromkeys(layout, card)
    problems, notes = list(misfits(layout, cards)), [*simultaneous_starts(layout), *idle_gpus(recipe, layout)]
    unknown = unknown_sizes(layout)
    notes += [*preemptions(layout, cards), *other_recomputation(recipe, shape, layout, cards)]
    notes += [*(f"the size of {who} is not known: {why}" for who, why in unknown.items())]
    if args.json:
        parts = {"shape": shape, "load": load, "estimate": found, "card": card}
        document: dict[str, Any] = {name: dataclasses.asdict(part) for name, part in parts.items()}
        document["loop_costs"] = {name: dataclasses.asdict(cost) for name, cost in costs.items()}
        document["gpus"] = {number: [dataclasses.asdict(one) for one in found] for number, found in layout.items()}
        print(json.dumps(document | {"problems": problems, "notes": notes}, indent=2))
    else:
        print("\n".join(_lines(recipe, shape, load, found, costs)))
        print(f"  sizes of the model      from {source}")
        if layout:
            print(f"GPUs of {card_gib:g} GiB as [local.gpus] gives them (computed, not measured):")
            fits = "what is known fits" if unknown else "everything fits"
            ends = [f"does not fit: {sentence}" for sentence in problems] or [fits]
            print("\n".join([*layout_lines(layout, cards), *(f"note: {note}" for note in notes), *ends]))
    return EXIT_FAILED if problems else 0


def starting_shape(args: argparse.Namespace, recipe: Recipe) -> tuple[ModelShape, str]:
    """Return the sizes of the starting model, and where they were found, without downloading it.

    Raises:
        ConfigError: they are not known, or the recipe recomputes more layers than it has; says what to do.
    """
    if (size := args.model) is not None:
        shape, source = known_shape(size), f"the table of known models ({size})"
        if shape is None:
            raise ConfigError(f"--model {size!r} is not known; known are {', '.join(SHAPES)}")
    else:
        try:
            shape, source = shape_in_recipe(recipe.model.path, recipe, ask_hub=shape_on_hub)
        except ConfigError as error:
            raise ConfigError(f"{error}; name a size instead, such as --model 7b") from None
    if (wanted := recipe.trainer.gradient_checkpointing) > shape.num_layers:  # the trainer would refuse it
        raise ConfigError(
            f"trainer.gradient_checkpointing = {wanted}, and the model has {shape.num_layers} layers; "
            "set it to that number at most, or to true"
        )
    return shape, source


def in_range(flag: str, value: float) -> float:
    """Return the value of a flag.

    Raises:
        ConfigError: it is out of range.
    """
    if not 0 < value < 1e9:
        raise ConfigError(f"{flag} is {value:g}; it must be above 0 and below 1e9")
    return value


def _load(args: argparse.Namespace, recipe: Recipe) -> Load:
    for name in ("step_s", "prompt_tokens", "response_tokens"):
        if (value := getattr(args, name)) is not None:
            in_range(f"--{name.replace('_', '-')}", value)
    searcher = recipe.searcher
    return Load(
        # half of the limits: most rollouts are shorter than they may be
        prompt_tokens=args.prompt_tokens or max(1, searcher.max_prompt_tokens // 2),
        response_tokens=args.response_tokens or max(1, searcher.max_response_tokens // 2),
        step_s=args.step_s,
        num_searchers=searcher.num_searchers,
        concurrent_rollouts=searcher.num_slots,
    )


def _lines(recipe: Recipe, shape: ModelShape, load: Load, found: Estimate, costs: Mapping[str, LoopCost]) -> list[str]:
    section = recipe.trainer
    num_versions = section.keep_versions + recipe.num_lag_versions
    is_dense = shape.num_active_params == shape.num_params
    active = "" if is_dense else f" ({shape.num_active_params / 1e9:.3g}B for a token)"
    return [
        f"{shape.num_params / 1e9:.3g}B parameters{active}, {section.num_processes} trainer process(es), "
        f"{load.num_searchers} searcher(s), {load.prompt_tokens} + {load.response_tokens} tokens a rollout, "
        f"{load.step_s:g} s a step",
        f"  trainer, each process   {size_text(found.trainer_gpu_bytes)} of GPU memory",
        f"  searcher, each          {size_text(found.searcher_gpu_bytes)} of GPU memory and what vLLM adds "
        "(1 to 2 GiB)",
        f"  rollout                 {size_text(found.rollout_bytes)}",
        f"  Redis                   {size_text(found.redis_bytes)} at the bounds of [buffer], at worst "
        f"{size_text(found.redis_peak_bytes)} while it rewrites its file",
        f"  version / checkpoint    {size_text(found.version_bytes)} / {size_text(found.checkpoint_bytes)}",
        f"  object store            {size_text(found.store_bytes)} kept ({num_versions} versions, "
        f"{section.keep_checkpoints} checkpoints, and what is being written)",
        f"  store traffic           {size_text(found.publish_bytes_per_s)}/s written by the trainer, "
        f"{size_text(found.pull_bytes_per_s)}/s read by all searchers",
        *_staging_lines(recipe, found),
        *(
            f"  loop waits: {name:<17}  {cost.total_s:.3g} s ({cost.device_s:.2g} off the device, {cost.disk_s:.3g} to "
            f"the local disk), {cost.step_share:.2g} of a step, {cost.loop_share:.1%} of all time"
            for name, cost in costs.items()
        ),
    ]


def _staging_lines(recipe: Recipe, found: Estimate) -> list[str]:
    """Return where a checkpoint is copied to, where that depends on the machine."""
    if recipe.trainer.checkpoint_staging != "auto":
        return []
    needed = size_text(found.checkpoint_bytes / STAGING_FREE_SHARE)
    return [
        f"  checkpoint is copied    to memory where {needed} are free for all trainer processes together (pinned, with "
        "GPUs: up to twice that), else to the local disk"
    ]


def size_text(num_bytes: float) -> str:
    """Return a number of bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # below 1000 and not 1024: three digits are enough to read
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
