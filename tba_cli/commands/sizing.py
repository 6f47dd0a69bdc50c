"""`tba sizing`: the memory and disk that a recipe needs. The trainer's step is traced; nothing else is started."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.artifacts.huggingface import shape_on_hub
from tba_cli.child_processes import ask_program
from tba_cli.commands.config import EXIT_FAILED, size_text
from tba_cli.console import print_answer
from tba_cli.resolve import with_absolute_paths
from tba_cli.sizing.estimate import Estimate, estimate
from tba_cli.sizing.gpu_layout import CARD_GIB, GIB, gpu_layout, layout_lines, misfits
from tba_cli.sizing.model_shape import ModelShape, shape_of_folder, shape_of_warm_start

PARTS = {
    "parameters": "weights",
    "reference": "reference model",
    "published": "copy in the published dtype",
    "gradients": "gradients",
    "optimizer": "moments of AdamW",
}
"""Memory that a trainer process holds between two steps: names in the trace, and the names that are shown."""


def sizing_command(args: argparse.Namespace) -> int:
    """Print the memory and disk that a recipe needs; return 1 if a process does not fit on its GPU."""
    recipe = load_recipe(args.recipe, sets=args.set)
    gib = CARD_GIB if args.gpu_memory_gib is None else args.gpu_memory_gib
    if not 0 < gib < 1e6:
        raise ConfigError(f"--gpu-memory-gib is {gib:g}; it must be above 0 and below 1e6")

    @functools.cache
    def shape_of(path: str) -> ModelShape:
        return _shape_in(recipe, path)

    shape, gpu_bytes = shape_of(recipe.model.path), round(gib * GIB)
    found = estimate(recipe, shape)
    # the resolved recipe: the program must not read the variables of this shell again
    config, model = with_absolute_paths(recipe).model_dump_json(), json.dumps(shape.config)
    trace = ask_program("tba_trainer.memory_trace", config=config, model=model)
    layout = gpu_layout(recipe, shape_of, trainer_peak_bytes=trace["peak_bytes"])
    problems = list(misfits(layout, gpu_bytes))
    lines = list(_lines(recipe, shape, trace, found))
    if layout:
        lines.append(f"GPUs of {gib:g} GiB as [local.gpus] gives them (computed, not measured):")
        ends = [f"does not fit: {sentence}" for sentence in problems] or ["everything fits"]
        lines += [*layout_lines(layout, gpu_bytes), *ends]
    gpus = {number: [asdict(one) for one in occupants] for number, occupants in layout.items()}
    document = {"shape": asdict(shape), "trainer": trace, "estimate": asdict(found), "gpus": gpus}
    print_answer(document | {"problems": problems}, lines, as_json=args.json)
    return EXIT_FAILED if problems else 0


def _shape_in(recipe: Recipe, path: str) -> ModelShape:
    """Return the shape of the model that is, or will be, in a folder of the recipe, without downloading the model."""
    folder = Path(path)
    if folder.is_dir():
        return shape_of_folder(folder)
    if recipe.model.warm_start is not None and path == recipe.model.path:
        return shape_of_warm_start()
    item = next((item for item in recipe.prepare if item.path == path), None)
    if item is None or item.hub is None or item.gguf is not None:
        raise ConfigError(f"{folder} is not here, and the recipe names no model folder of the hub; set model.path")
    return shape_on_hub(item.hub, item.revision)


def _lines(recipe: Recipe, shape: ModelShape, trace: Mapping[str, Any], found: Estimate) -> Iterator[str]:
    parts, layers = trace["bytes"], " and ".join(map(str, trace["layers_traced"]))
    searcher, section = recipe.searcher, recipe.trainer
    yield (
        f"{shape.num_params / 1e9:.3g}B parameters; {section.num_processes} trainer process(es), "
        f"{searcher.num_searchers} searcher(s)"
    )
    how = f"traced on fake tensors with {layers} of {shape.num_layers} layers, every rollout at its longest"
    yield _row("trainer, each process", trace["peak_bytes"], f"peak of a step; {how}")
    for name, text in PARTS.items():
        yield _row(f"  {text}", parts[name])
    tokens = f"of a micro-batch of {trace['max_tokens']:,} tokens"
    yield _row("  activations and logits", parts["forward_backward_peak"] - trace["state_bytes"], tokens)
    yield _row("searcher, each: weights", found.weights_bytes)
    cache = f"of {searcher.num_slots} rollouts at their longest; vLLM takes its share of the GPU"
    yield _row("  keys and values", found.kv_cache_bytes, cache)
    yield _row("rollout", found.rollout_bytes, "at its longest")
    at_worst = f"at the bounds of [buffer]; at worst {size_text(found.redis_peak_bytes)} while it rewrites its file"
    yield _row("Redis", found.redis_bytes, at_worst)
    yield _row("version of the weights", found.version_bytes)
    yield _row("checkpoint", found.checkpoint_bytes)
    num_versions = section.keep_versions + recipe.num_lag_versions
    kept = f"{num_versions} versions, {section.keep_checkpoints} checkpoints, and what is being written"
    yield _row("object store", found.store_bytes, kept)


def _row(name: str, num_bytes: int, text: str = "") -> str:
    return f"  {name:<30} {size_text(num_bytes):>10}  {text}".rstrip()
