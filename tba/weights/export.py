"""Export a weight version as a folder for transformers and vLLM, or its adapter for peft, with a model card for Hugging
Face (huggingface.co/docs/hub/model-cards)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import tba
from tba.api import BestVersion, EvalInfo, SettingsAudit
from tba.config import Recipe
from tba.config.data import with_replaced
from tba.errors import MalformedError
from tba.tls import with_bare_urls
from tba.versions import PolicyVersion
from tba.weights import WeightVersions, write_index
from tba.weights.adapter import A_SUFFIX
from tba.weights.digest import tensor_header
from tba.weights.experts import SPLIT_FAMILIES, split_experts
from tba.weights.publishing import NOT_TOKENIZER
from tba.wire.weight_manifest import Manifest

PAPER = "https://arxiv.org/abs/2503.18929"
_PRIVATE: dict[str, Any] = {
    "auth": True,
    "tls": True,
    "local": True,
    "store": True,
    "log_format": True,
    "tracking": True,
    "buffer": {"host", "port", "url", "redis_url", "redis_password_file"},
    "reward": {"host", "port", "url"},
    "searcher": {"openai"},
}
"""Addresses and secrets of the machines, which are left out of a card."""
_PATHS = (("model", "path"), ("data", "path"), ("eval", "embedding_model"))
"""Files and folders, of which a card shows the base names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of a run that a card shows beside the manifest."""

    recipe: Recipe
    evals: Sequence[EvalInfo] = ()
    best: BestVersion | None = None
    changes: Sequence[SettingsAudit] = ()
    """Of the live settings, oldest first."""


def render_card(manifest: Manifest, facts: RunFacts, *, is_adapter: bool = False) -> str:
    """Return the text of README.md, of the model or of its adapter alone."""
    recipe = facts.recipe
    evaluated = [item for item in facts.evals if item.state == "done"]
    own = _largest([item for item in evaluated if item.version == manifest.version])
    parts = [
        _front_matter(manifest, recipe, own, library="peft" if is_adapter else "transformers"),
        f"# {manifest.run}, version {manifest.version}",
        f"Weight version `{manifest.version}` of the run `{manifest.run}`: `{_base_model(recipe)}`, post-trained with "
        f"[Trajectory Balance with Asynchrony]({PAPER}) by tba {tba.__version__}.",
        "## Results",
        _results(manifest, facts, evaluated),
        "## How it was trained",
        _training(manifest, recipe, is_adapter=is_adapter),
        *_changes(facts.changes),
        "The recipe, as far as it differs from the defaults of this release of tba:",
        "```json\n" + json.dumps(public_recipe(recipe), indent=1) + "\n```",
        "## Use",
        _use(recipe, is_adapter=is_adapter),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(manifest: Manifest, recipe: Recipe, own: EvalInfo | None, *, library: str) -> str:
    """Return the YAML front matter; every value is JSON, which YAML includes."""
    fields: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "base_model": _base_model(recipe),
        "tags": ["tba", "reinforcement-learning", "trajectory-balance", recipe.objective.preset],
    }
    metrics = [] if own is None else _metrics(own)
    if own is not None and metrics:
        where = recipe.data.source_name
        result = {
            "task": {"type": "text-generation"},
            "dataset": {"type": where, "name": f"{own.num_prompts} held-out prompts of {where}"},
            "metrics": metrics,
        }
        fields["model-index"] = [{"name": manifest.run, "results": [result]}]
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _metrics(own: EvalInfo) -> list[dict[str, Any]]:
    values = {
        "pass@1, sampled at the policy temperature": ("accuracy", own.accuracy),
        "pass@1, greedy": ("accuracy", own.greedy_accuracy),
        **{f"pass@{k}": (f"pass@{k}", value) for k, value in own.pass_at.items()},
        "mean reward": ("mean_reward", own.mean_reward),
    }
    return [{"type": kind, "name": name, "value": v} for name, (kind, v) in values.items() if v is not None]


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
        lines.append(_row([name, item.version, str(item.num_prompts), *map(_number, numbers)]))
    if rows["this version"] is None:
        lines.append("\nThis version itself was not evaluated.")
    lines.append(
        "\nOn held-out prompts that were never trained on; scores that are unknown are left out. "
        f"A completion succeeds when its reward is at least {facts.recipe.eval.success_reward:g}."
    )
    return "\n".join(lines)


def _training(manifest: Manifest, recipe: Recipe, *, is_adapter: bool) -> str:
    sampling, trainer, objective = recipe.sampling, recipe.trainer, recipe.objective
    num_rollouts = manifest.policy_version.step * sampling.prompts_per_batch * sampling.group_size
    lora = recipe.model.lora
    merged = "" if is_adapter else ", merged into the weights"
    what = "all weights" if lora is None else f"a LoRA adapter of rank {lora.rank}{merged}"
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


def _use(recipe: Recipe, *, is_adapter: bool) -> str:
    temperature, base = recipe.model.policy_temperature, _base_model(recipe)
    model = f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), ".")'
    load = model if is_adapter else 'AutoModelForCausalLM.from_pretrained(".")'
    serve = "vllm serve ."
    if is_adapter:
        rank = 1 if recipe.model.lora is None else recipe.model.lora.rank
        # vLLM makes room for adapters of rank 16 unless it is told, and knows powers of two
        room = f" --max-lora-rank {1 << (rank - 1).bit_length()}" if rank > 16 else ""
        serve = f"vllm serve {base} --enable-lora{room} --lora-modules adapter=."
    return (
        "```python\n"
        + ("from peft import PeftModel\n" if is_adapter else "")
        + "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model, tokenizer = {load}, AutoTokenizer.from_pretrained(".")\n```\n\n'
        f"or `{serve}`. The model was trained on prompts exactly as the tokenizer encodes them, "
        f"{_form(recipe)}. The policy that was trained is the model sampled at temperature {temperature:g}."
    )


def _form(recipe: Recipe) -> str:
    sections = [section for section in recipe.data.sets if section.column]
    if not sections:
        return "without a chat template"
    arguments = sections[0].chat_template_kwargs
    called = f", called with `{json.dumps(arguments)}`" if arguments else ""
    return f"after its chat template{called} made text of those that are messages"


def _changes(changes: Sequence[SettingsAudit]) -> list[str]:
    """Return the section about changed live settings."""
    if not changes:
        return []
    # reasons are left out: they were written for the people of the run
    lines = [audit.model_copy(update={"reason": None}).line() for audit in changes]
    text = "Settings that were changed while the run trained (steps are lineage-step; `recipe` is the value below):"
    return [text, "```text\n" + "\n".join(lines) + "\n```"]


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return what a card may show of a recipe: what differs from the defaults, without addresses and secrets."""
    document = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_PRIVATE)
    paths = [path for item in recipe.prepare for path in (item.path, item.trl_file) if path is not None]
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


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


CARD_NAME = "README.md"
CONFIG_NAME = "config.json"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""As peft calls them."""


def write_export(versions: WeightVersions, version: PolicyVersion, folder: Path, facts: RunFacts) -> Manifest:
    """Download a version into `folder`, verify every digest, and write its model card.

    Experts get tensors of their own (experts.py).

    Raises:
        ObjectNotFoundError: the version does not exist (any more).
        DigestError, MalformedError: what the store holds is damaged.
        StoreUnavailableError
        OSError: the local disk is full.
    """
    local = versions.download_model(version, folder)
    manifest = local.manifest
    config = _name_dtype(folder / CONFIG_NAME, manifest.dtype)
    if config.get("model_type") in SPLIT_FAMILIES:
        for path in local.paths:
            split_experts(path)
        if len(local.paths) > 1:
            write_index(folder, local.paths)
    (folder / CARD_NAME).write_text(render_card(manifest, facts), encoding="utf-8")
    return manifest


def write_adapter(versions: WeightVersions, version: PolicyVersion, folder: Path, facts: RunFacts) -> Manifest:
    """Write the LoRA adapter of a version into `folder` as peft reads it, with the tokenizer and a model card.

    Raises:
        ObjectNotFoundError: the version does not exist, or was published merged, and has no adapter.
        DigestError, MalformedError: what the store holds is damaged.
        StoreUnavailableError
        OSError: the local disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ADAPTER_FILE
    manifest = versions.download_adapter(version, path)
    adapter = manifest.adapter
    assert adapter is not None
    layers = {name.removesuffix(A_SUFFIX) for name in tensor_header(path) if name.endswith(A_SUFFIX)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _base_model(facts.recipe),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": adapter.fan_in_fan_out,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for stored in manifest.files:
        if stored.name not in NOT_TOKENIZER and (data := versions.read_file(version, stored.name)) is not None:
            (folder / stored.name).write_bytes(data)
    (folder / CARD_NAME).write_text(render_card(manifest, facts, is_adapter=True), encoding="utf-8")
    return manifest


def _name_dtype(path: Path, dtype: str) -> dict[str, Any]:
    """Write the dtype of the published weights into config.json, and return it."""
    # this config.json is that of the starting model, which may have another dtype
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise MalformedError(f"{path.name} of the published version is not JSON: {error}") from None
    config["dtype"] = dtype
    if "torch_dtype" in config:  # the name that transformers used before 4.56
        config["torch_dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config
