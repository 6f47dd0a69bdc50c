"""`tba config check|show|schema` and `tba sizing`: what a recipe says, and what it needs. Nothing is started."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.artifacts.huggingface import shape_on_hub
from tba_cli.sizing import (
    MAKER_SHAPES,
    SHAPES,
    Estimate,
    Load,
    ModelShape,
    estimate,
    known_shape,
    shape_of_folder,
    shape_of_new_model,
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
    """Print every value that results from the recipe, the environment and the flags, defaults included."""
    print(load_recipe(args.recipe, sets=args.set).model_dump_json(indent=2, ensure_ascii=True))
    return 0


def schema_command(args: argparse.Namespace) -> int:
    """Print the JSON schema of a recipe; editors and the Helm chart read it."""
    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0


def sizing_command(args: argparse.Namespace) -> int:
    """Print the estimate of one recipe.

    Raises:
        ConfigError: a number is out of range, or the sizes of the model are not known.
    """
    recipe = load_recipe(args.recipe, sets=args.set)
    shape, source = _shape(args, recipe)
    load = _load(args, recipe)
    found = estimate(recipe, shape, load)
    if args.json:
        parts = {"shape": shape, "load": load, "estimate": found}
        print(json.dumps({name: dataclasses.asdict(part) for name, part in parts.items()}, indent=2))
    else:
        print("\n".join(_lines(recipe, shape, load, found)))
        print(f"  sizes of the model      from {source}")
    return 0


def _shape(args: argparse.Namespace, recipe: Recipe) -> tuple[ModelShape, str]:
    """Return the sizes of the starting model, and where they were found, without downloading it.

    Raises:
        ConfigError: they are not known; says what to do.
    """
    if (size := args.model) is not None:
        shape = known_shape(size)
        if shape is None:
            raise ConfigError(f"--model {size!r} is not known; known are {', '.join(SHAPES)}")
        return shape, f"the table of known models ({size})"
    return _shape_of(recipe.model.path, recipe)


def _shape_of(path: str, recipe: Recipe) -> tuple[ModelShape, str]:
    """Return the sizes of the model that is, or will be, in a folder that the recipe names."""
    folder = Path(path)
    # the folder is exact; the tables below are for models that are not here
    if folder.is_dir():
        return shape_of_folder(folder), f"the folder {folder}"
    if recipe.model.warm_start is not None and path == recipe.model.path:
        return SHAPES["quickstart"], "what [model.warm_start] makes"
    trained = next((item for item in recipe.sft if (item.path or recipe.model.path) == path), None)
    if trained is not None and trained.new_model is not None:
        return shape_of_new_model(trained.new_model), "[sft.new_model] of the recipe"
    if trained is not None and trained.base is not None:
        # fine-tuning keeps the sizes; no item starts from itself (the recipe refuses a path that is made twice)
        return _shape_of(trained.base, recipe)
    item = next((item for item in recipe.prepare if item.path == path), None)
    if item is not None and item.maker is not None:
        # reward models and victims have makers as well, and are no policies
        if item.maker not in MAKER_SHAPES:
            raise ConfigError(
                f"model.path {folder} is not here, and the maker {item.maker!r} makes no policy; the makers of "
                f"policies are {', '.join(MAKER_SHAPES)}"
            )
        return MAKER_SHAPES[item.maker], f"the table of makers ({item.maker})"
    name = folder.name if item is None or item.hub is None else item.hub
    if (shape := known_shape(name)) is not None:
        return shape, f"the table of known models ({name})"
    if item is not None and item.hub is not None:
        return shape_on_hub(item.hub, item.revision), f"config.json of {item.hub} on the hub"
    raise ConfigError(
        f"model.path {folder} is not here, and {name!r} is in no table of known models; name a size, such as --model 7b"
    )


def _load(args: argparse.Namespace, recipe: Recipe) -> Load:
    for name in ("step_s", "prompt_tokens", "response_tokens"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it must be above 0 and below 1e9")
    searcher = recipe.searcher
    return Load(
        # half of the limits: most rollouts are shorter than they may be
        prompt_tokens=args.prompt_tokens or max(1, searcher.max_prompt_tokens // 2),
        response_tokens=args.response_tokens or max(1, searcher.max_response_tokens // 2),
        step_s=args.step_s,
        num_searchers=searcher.num_searchers,
        concurrent_rollouts=searcher.num_slots,
    )


def _lines(recipe: Recipe, shape: ModelShape, load: Load, found: Estimate) -> list[str]:
    section = recipe.trainer
    return [
        f"{shape.num_params / 1e9:.3g}B parameters, {section.num_processes} trainer process(es), {load.num_searchers} "
        f"searcher(s), {load.prompt_tokens} + {load.response_tokens} tokens a rollout, {load.step_s:g} s a step",
        f"  trainer, each process   {_size(found.trainer_gpu_bytes)} of GPU memory",
        f"  searcher, each          {_size(found.searcher_gpu_bytes)} of GPU memory and what vLLM adds (1 to 2 GiB)",
        f"  rollout                 {_size(found.rollout_bytes)}",
        f"  Redis                   {_size(found.redis_bytes)} at the bounds of [buffer], at worst "
        f"{_size(found.redis_peak_bytes)} while it rewrites its file",
        f"  version / checkpoint    {_size(found.version_bytes)} / {_size(found.checkpoint_bytes)}",
        f"  object store            {_size(found.store_bytes)} kept ({section.keep_versions} versions, "
        f"{section.keep_checkpoints} checkpoints, and what is being written)",
        f"  store traffic           {_size(found.publish_bytes_per_s)}/s written by the trainer, "
        f"{_size(found.pull_bytes_per_s)}/s read by all searchers",
    ]


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        # below 1000 and not 1024: three digits are enough to read
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
