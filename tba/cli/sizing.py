"""`tba sizing`: what a recipe needs of GPUs, Redis, object store and network, estimated."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba.local.hub import shape_on_hub
from tba.sizing import MAKER_SHAPES, SHAPES, Estimate, Load, ModelShape, estimate, known_shape, shape_of_folder


def sizing_command(args: argparse.Namespace) -> int:
    """Print the estimate of one recipe.

    Raises:
        ConfigError: a number that cannot be, or no model to take the sizes of.
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
    """The sizes of the starting model, and where they were found: nothing has to be downloaded.

    Raises:
        ConfigError: nobody knows them; says what to do.
    """
    if (size := args.model) is not None:
        shape = known_shape(size)
        if shape is None:
            raise ConfigError(f"--model {size!r} is not known; known are {', '.join(SHAPES)}")
        return shape, f"the table of known models ({size})"
    folder = Path(recipe.model.path)
    if folder.is_dir():
        return shape_of_folder(folder), f"the folder {folder}"
    if recipe.model.warm_start is not None:
        return SHAPES["quickstart"], "what [model.warm_start] makes"
    item = next((item for item in recipe.prepare if item.path == recipe.model.path), None)
    if item is not None and item.maker is not None:
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
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
