"""Export a weight version as a folder for transformers and vLLM, with a model card for Hugging Face
(huggingface.co/docs/hub/model-cards)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import tba
from tba.api import BestVersion, EvalInfo
from tba.config import Recipe
from tba.config.data import with_replaced
from tba.errors import MalformedError
from tba.tls import with_bare_urls
from tba.versions import PolicyVersion
from tba.weights import WeightVersions, write_index
from tba.weights.digest import tensor_header
from tba.wire.weight_manifest import Manifest

PAPER = "https://arxiv.org/abs/2503.18929"
_PRIVATE: dict[str, Any] = {
    "auth": True,
    "tls": True,
    "local": True,
    "store": True,
    "tracking": True,
    "buffer": {"host", "port", "url", "redis_url", "redis_password_file"},
    "reward": {"host", "port", "url"},
    "searcher": {"openai"},
}
"""Recipe keys with addresses and secrets of machines; a model card leaves them out."""
_PATHS = (("model", "path"), ("data", "path"), ("eval", "embedding_model"))
"""Recipe keys that hold a path; a model card shows only its base name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of a run that a model card shows, in addition to the manifest."""

    recipe: Recipe
    evals: Sequence[EvalInfo] = ()
    best: BestVersion | None = None


def render_card(manifest: Manifest, facts: RunFacts) -> str:
    """Return the text of the model card, README.md."""
    recipe = facts.recipe
    evaluated = [item for item in facts.evals if item.state == "done"]
    fields = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": _base_model(recipe),
        "tags": ["tba", "reinforcement-learning", "trajectory-balance", recipe.objective.preset],
    }
    # YAML includes JSON
    front_matter = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    parts = [
        "\n".join(["---", *front_matter, "---"]),
        f"# {manifest.run}, version {manifest.version}",
        f"Weight version `{manifest.version}` of the run `{manifest.run}`: `{_base_model(recipe)}`, post-trained with "
        f"[Trajectory Balance with Asynchrony]({PAPER}) by tba {tba.__version__}.",
        "## Results",
        _results(manifest, facts, evaluated),
        "## How it was trained",
        _training(manifest, recipe),
        "The recipe, as far as it differs from the defaults of this release of tba:",
        "```json\n" + json.dumps(public_recipe(recipe), indent=1) + "\n```",
        "## Use",
        _use(recipe),
    ]
    return "\n\n".join(parts) + "\n"


def _results(manifest: Manifest, facts: RunFacts, evaluated: Sequence[EvalInfo]) -> str:
    rows = {
        "start of the run": _largest(evaluated[:1]),
        "this version": _largest([item for item in evaluated if item.version == manifest.version]),
    }
    known = {name: item for name, item in rows.items() if item is not None}
    if not known:
        return "No evaluation of this run is known."
    ks = sorted({k for item in known.values() for k in item.pass_at})
    heads = ["", "version", "prompts", "pass@1 sampled", "pass@1 greedy", *(f"pass@{k}" for k in ks), "mean reward"]
    lines = [_row(heads), "|" + "---|" * len(heads)]
    for name, item in known.items():
        numbers = [item.accuracy, item.greedy_accuracy, *(item.pass_at.get(k) for k in ks), item.mean_reward]
        lines.append(
            _row(
                [
                    name,
                    item.version,
                    str(item.num_prompts),
                    *(("unknown" if x is None else f"{x:.3f}") for x in numbers),
                ]
            )
        )
    if rows["this version"] is None:
        lines.append("\nThis version itself was not evaluated.")
    lines.append(
        "\nOn held-out prompts that were never trained on; scores that are unknown are left out. "
        f"A completion succeeds when its reward is at least {facts.recipe.eval.success_reward:g}."
    )
    return "\n".join(lines)


def _training(manifest: Manifest, recipe: Recipe) -> str:
    sampling, trainer, objective = recipe.sampling, recipe.trainer, recipe.objective
    num_rollouts = manifest.policy_version.step * sampling.prompts_per_batch * sampling.group_size
    lora = recipe.model.lora
    what = "all weights" if lora is None else f"a LoRA adapter of rank {lora.rank}, merged into the weights"
    return "\n".join(
        [
            f"* objective `{objective.preset}`, beta {_schedule(objective.beta)}, learning rate "
            f"{_schedule(trainer.learning_rate)}",
            f"* {manifest.policy_version.step} optimizer steps of {sampling.prompts_per_batch} prompts with "
            f"{sampling.group_size} rollouts each: up to {num_rollouts} rollouts trained",
            f"* asynchronous: weights published every {trainer.sync_interval} steps, share of recent rollouts "
            f"{sampling.most_on_policy_prob:g}, the rest from the replay buffer",
            f"* trained: {what}; seed {recipe.run.seed}",
            f"* parent version `{manifest.parent}`, dtype {manifest.dtype}, sha256 of the parameters "
            f"`{manifest.params_sha256}`",
        ]
    )


def _use(recipe: Recipe) -> str:
    sections = [section for section in recipe.data.sets if section.column]
    form = "without a chat template"
    if sections:
        arguments = sections[0].chat_template_kwargs
        called = f", called with `{json.dumps(arguments)}`" if arguments else ""
        form = f"after its chat template{called} made text of those that are messages"
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")\n```\n\n'
        f"or `vllm serve .`. The model was trained on prompts exactly as the tokenizer encodes them, {form}. "
        f"The policy that was trained is the model sampled at temperature {recipe.model.policy_temperature:g}."
    )


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the part of a recipe that a model card may show: values other than the defaults, no address or secret."""
    document = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_PRIVATE)
    paths = [path for item in recipe.prepare for path in (item.path, item.trl_file, item.gguf_path) if path]
    document = with_replaced(document, {path: PurePath(path).name for path in paths})
    for section, key in _PATHS:
        if path := document.get(section, {}).get(key):
            document[section][key] = PurePath(path).name
    return with_bare_urls(document)


def _base_model(recipe: Recipe) -> str:
    return PurePath(recipe.model.path).name


def _largest(items: Sequence[EvalInfo]) -> EvalInfo | None:
    return max(items, key=lambda item: item.num_prompts, default=None)


def _schedule(value: Any) -> str:
    return f"{value.value:g}" if value.kind == "constant" else f"{value.value:g} ({value.kind})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


CARD_NAME = "README.md"
CONFIG_NAME = "config.json"
SPLIT_FAMILIES = frozenset({"olmoe", "qwen2_moe", "qwen3_moe"})
"""`model_type` of the families whose checkpoints hold one tensor per expert (`mlp.experts.0.gate_proj.weight`, ...)."""
_PARTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}
_ALIGNMENT_BYTES = 8


def write_export(versions: WeightVersions, version: PolicyVersion, folder: Path, facts: RunFacts) -> Manifest:
    """Download a version into `folder`, verify every digest, and write its model card.

    `config.json` gets the dtype of the version. Models of `SPLIT_FAMILIES` get one tensor per expert (`split_experts`).

    Raises:
        ObjectNotFoundError: the version does not exist (any more).
        DigestError, MalformedError: an object in the store is damaged.
        StoreUnavailableError
        OSError: the local disk is full.
    """
    local = versions.download_model(version, folder)
    manifest = local.manifest
    try:
        config = json.loads((folder / CONFIG_NAME).read_bytes())
    except ValueError as error:
        raise MalformedError(f"{CONFIG_NAME} of the published version is not JSON: {error}") from None
    # this config.json is that of the starting model, which may have another dtype
    config["dtype"] = manifest.dtype
    if "torch_dtype" in config:  # the name that transformers used before 4.56
        config["torch_dtype"] = manifest.dtype
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if config.get("model_type") in SPLIT_FAMILIES:
        for path in local.paths:
            split_experts(path)
        if len(local.paths) > 1:
            write_index(folder, local.paths)
    (folder / CARD_NAME).write_text(render_card(manifest, facts), encoding="utf-8")
    return manifest


def split_experts(path: Path) -> None:
    """Split the fused expert tensors of a safetensors file, in place, into one tensor per expert and projection.

    Most tools expect those. Published versions hold two fused tensors per layer, as transformers 5 makes them:
    [E, 2 I, H] (gate above up) and [E, H, I] (down). E experts, I their inner size, H hidden units. Both tensors are
    contiguous, expert after expert, so the data bytes stay and only the header of the file changes.

    Raises:
        MalformedError: not a safetensors file.
        OSError: for example a full disk; a second copy of the file is written first, which then replaces the file.
    """
    old = tensor_header(path)
    new = {name: entry for names in map(_split, old, old.values()) for name, entry in names}
    if new.keys() == old.keys():
        return
    header = json.dumps({"__metadata__": {"format": "pt"}, **new}).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)  # tensors begin at a multiple of it
    other = path.with_suffix(".part")
    try:
        with path.open("rb") as source, other.open("wb") as target:
            source.seek(8 + int.from_bytes(source.read(8), "little"))
            target.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(source, target, 2**24)
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)


def _split(name: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the new tensors' names and header entries; a tensor that holds no fused experts stays as it is."""
    suffix = next((suffix for suffix in _PARTS if name.endswith(suffix)), None)
    if suffix is None:
        yield name, entry
        return
    layer, parts = name.removesuffix(suffix), _PARTS[suffix]
    num_experts, num_rows, num_columns = entry["shape"]
    start, end = entry["data_offsets"]
    size_bytes = (end - start) // (num_experts * len(parts))
    for number in range(num_experts * len(parts)):
        expert, part = divmod(number, len(parts))
        first = start + number * size_bytes
        yield (
            f"{layer}.mlp.experts.{expert}.{parts[part]}.weight",
            {
                "dtype": entry["dtype"],
                "shape": [num_rows // len(parts), num_columns],
                "data_offsets": [first, first + size_bytes],
            },
        )
