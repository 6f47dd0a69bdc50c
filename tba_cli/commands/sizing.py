"""`tba sizing`: the memory and disk that a recipe needs. The trainer's step is traced; nothing else is started."""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.artifacts.huggingface import shape_on_hub
from tba_cli.child_processes import run_program
from tba_cli.commands.config import EXIT_FAILED, size_text
from tba_cli.resolve import with_absolute_paths
from tba_cli.sizing import (
    CARD_GIB,
    GIB,
    SHAPES,
    Card,
    Estimate,
    ModelShape,
    estimate,
    gpu_layout,
    known_shape,
    layout_lines,
    misfits,
    shape_in_recipe,
    simultaneous_starts,
    trainer_remedy,
    unknown_sizes,
)

PARTS = {
    "parameters": "weights",
    "reference": "reference model",
    "published": "copy in the published dtype",
    "gradients": "gradients",
    "optimizer": "moments of AdamW",
}
"""What a trainer process holds between two steps, by the names of the trace."""


def sizing_command(args: argparse.Namespace) -> int:
    """Print what one recipe needs; return 1 if somebody finds too little memory on a GPU.

    Raises:
        ConfigError: a number is out of range, or the sizes of the model are not known.
    """
    recipe = load_recipe(args.recipe, sets=args.set)
    gib = CARD_GIB if args.gpu_memory_gib is None else args.gpu_memory_gib
    if not 0 < gib < 1e6:
        raise ConfigError(f"--gpu-memory-gib is {gib:g}; it must be above 0 and below 1e6")
    shape, source = _starting_shape(args.model, recipe)
    found, trace = estimate(recipe, shape), _trace(recipe, shape)

    @functools.cache
    def shape_of(path: str) -> ModelShape:
        # --model stands for the starting model alone
        return shape if path == recipe.model.path else shape_in_recipe(path, recipe, ask_hub=shape_on_hub)[0]

    layout, card = gpu_layout(recipe, shape_of, trainer_peak_bytes=trace["peak_bytes"]), Card.empty(round(gib * GIB))
    cards = dict.fromkeys(layout, card)
    remedy = trainer_remedy(recipe, trace, num_layers=shape.num_layers, gpu_bytes=card.total_bytes) if layout else None
    # a trainer that does not fit alone needs no sentence about its own cards
    others = {
        gpu: each
        for gpu, each in layout.items()
        if remedy is None or not any(one.who.startswith("trainer") for one in each)
    }
    problems = [*([] if remedy is None else [remedy]), *misfits(others, cards)]
    unknown = unknown_sizes(layout)
    notes = [*simultaneous_starts(layout), *(f"the size of {who} is not known: {why}" for who, why in unknown.items())]
    if args.json:
        gpus = {number: [asdict(one) for one in occupants] for number, occupants in layout.items()}
        document = {"model": source, "shape": asdict(shape), "trainer": trace, "estimate": asdict(found), "gpus": gpus}
        print(json.dumps(document | {"problems": problems, "notes": notes}, indent=2))
    else:
        print("\n".join(_lines(recipe, shape, source, trace, found)))
        if layout:
            print(f"GPUs of {gib:g} GiB as [local.gpus] gives them (computed, not measured):")
            fits = "what is known fits" if unknown else "everything fits"
            ends = [f"does not fit: {sentence}" for sentence in problems] or [fits]
            print("\n".join([*layout_lines(layout, cards), *(f"note: {note}" for note in notes), *ends]))
    return EXIT_FAILED if problems else 0


def _starting_shape(size: str | None, recipe: Recipe) -> tuple[ModelShape, str]:
    """Return the sizes of the starting model, and where they were found, without downloading it.

    Raises:
        ConfigError: they are not known, or the recipe recomputes more layers than it has; says what to do.
    """
    if size is not None:
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


def _trace(recipe: Recipe, shape: ModelShape) -> dict[str, Any]:
    """Return what the program of the trainer prints; it needs torch, which this process never imports."""
    with tempfile.TemporaryDirectory(prefix="tba-sizing-") as folder:
        config, model = Path(folder) / "recipe.json", Path(folder) / "config.json"
        # the resolved recipe: the program must not read the variables of this shell again
        config.write_text(with_absolute_paths(recipe).model_dump_json(), encoding="utf-8")
        model.write_text(json.dumps(shape.config), encoding="utf-8")
        words = ["--config", str(config), "--model", str(model)]
        return json.loads(run_program("tba_trainer.memory_trace", words))


def _lines(recipe: Recipe, shape: ModelShape, source: str, trace: Mapping[str, Any], found: Estimate) -> Iterator[str]:
    parts, layers = trace["bytes"], " and ".join(map(str, trace["layers_traced"]))
    searcher, section = recipe.searcher, recipe.trainer
    yield (
        f"{shape.num_params / 1e9:.3g}B parameters from {source}; {section.num_processes} trainer process(es), "
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
