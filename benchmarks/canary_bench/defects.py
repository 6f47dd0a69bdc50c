"""Engines with wrong weights: model folders that differ from the published one in one known way."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tba_searcher.engines.weight_loader import load_model
from torch import Tensor

LEARNING_RATES = (1e-6, 1e-5, 1e-4, 1e-3)
STALE_HEAD_RATE = 1e-4
"""Learning rate of the version from which a stale output head comes."""
NUM_STEPS = 4
"""Optimizer steps between two versions."""
NUM_SEQUENCES, SAMPLED_TOKENS = 16, 24
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight|embed_in.weight|wte.weight"
_LAYER = re.compile(r"^(.*\.)(\d+)(\..*)$")


@dataclass(slots=True)
class Weights:
    """A model as tensors by name, and config.json."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Weights:
        """Read a folder: float32, a tied head named once."""
        model = load_model(folder, dtype="float32", device="cpu", trust_remote_code=False)
        tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return cls(tensors, json.loads((folder / "config.json").read_text()))

    def copy(self) -> Weights:
        """Return the same, whose entries can be replaced."""
        return Weights(dict(self.tensors), dict(self.config))

    def write(self, folder: Path, base: Path) -> Path:
        """Write them into `folder`, with the tokenizer of `base`."""
        folder.mkdir(parents=True)
        for path in base.glob("*.json"):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, folder)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: t.contiguous() for name, t in self.tensors.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        return folder

    def middle(self) -> dict[str, Tensor]:
        """Return the tensors of the layer in the middle."""
        matches = {name: match for name in self.tensors if (match := _LAYER.match(name))}
        number = (1 + max(int(match[2]) for match in matches.values())) // 2
        return {name: self.tensors[name] for name, match in matches.items() if int(match[2]) == number}

    @property
    def embedding(self) -> Tensor:
        """The input embedding."""
        return next(tensor for name, tensor in self.tensors.items() if re.search(EMBEDDING, name))

    def untie(self, head: Tensor) -> None:
        """Give the model an output head of its own."""
        self.tensors[HEAD if "embed_in" not in str(list(self.tensors)) else "embed_out.weight"] = head
        self.config["tie_word_embeddings"] = False


def wrong_weights(folder: Path) -> Iterator[tuple[str, Weights]]:
    """Yield every defect that the model can have, and what an engine with it would hold."""
    right = Weights.of(folder)
    for rate in LEARNING_RATES:
        older = right.copy()
        older.tensors = _other_version(folder, rate)
        yield f"the version before, lr {rate:.0e}", older
        if rate == STALE_HEAD_RATE:
            yield "output head of the version before", _with_head(right, older)
            stale = right.copy()
            stale.tensors |= {name: older.tensors[name] for name in right.middle()}
            yield "one layer of the version before", stale
    for name, change in _DEFECTS.items():
        changed = right.copy()
        change(changed)
        same = changed.config == right.config and changed.tensors.keys() == right.tensors.keys()
        if not (same and all(torch.equal(t, right.tensors[n]) for n, t in changed.tensors.items())):
            yield name, changed


def _other_version(folder: Path, learning_rate: float) -> dict[str, Tensor]:
    """Return the weights after some steps of AdamW on the model's own samples, with random advantages.

    The first steps of Adam move every weight by the learning rate: the versions of a long run are nearer.
    """
    model = load_model(folder, dtype="float32", device="cpu", trust_remote_code=False).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        ids = torch.randint(0, model.config.vocab_size, (NUM_SEQUENCES, 1), generator=generator)
        with torch.no_grad():
            for _ in range(SAMPLED_TOKENS):
                probs = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(dim=-1)
                ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], dim=1)
        advantages = torch.randn(NUM_SEQUENCES, 1, generator=generator)
        logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(dim=-1)
        optimizer.zero_grad(set_to_none=True)
        (-advantages * logprobs.gather(2, ids[:, 1:, None])[..., 0]).mean().backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _with_head(right: Weights, older: Weights) -> Weights:
    stale = right.copy()
    own = [name for name in right.tensors if name in (HEAD, "embed_out.weight")]
    if own:
        stale.tensors[own[0]] = older.tensors[own[0]]
    else:
        stale.untie(older.embedding)
    return stale


def _swap_layers(weights: Weights) -> None:
    for name in list(weights.middle()):
        match = _LAYER.match(name)
        assert match is not None
        other = f"{match[1]}{int(match[2]) - 1}{match[3]}"
        weights.tensors[name], weights.tensors[other] = weights.tensors[other], weights.tensors[name]


def _swap_tensors(weights: Weights) -> None:
    """Exchange the largest tensor of a layer and that of the layer before it."""
    name = max(weights.middle(), key=lambda n: weights.tensors[n].numel())
    match = _LAYER.match(name)
    assert match is not None
    other = f"{match[1]}{int(match[2]) - 1}{match[3]}"
    weights.tensors[name], weights.tensors[other] = weights.tensors[other], weights.tensors[name]


def _transpose(weights: Weights) -> None:
    for name, tensor in weights.middle().items():
        if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
            weights.tensors[name] = tensor.t().contiguous()
            return


def _zero_matrix(weights: Weights) -> None:
    name = max(weights.middle(), key=lambda n: weights.tensors[n].numel())
    weights.tensors[name] = torch.zeros_like(weights.tensors[name])


def _ones_for_norms(weights: Weights) -> None:
    for name, tensor in weights.tensors.items():
        if tensor.dim() == 1 and name.endswith("weight"):
            weights.tensors[name] = torch.ones_like(tensor)


def _no_biases(weights: Weights) -> None:
    for name, tensor in weights.tensors.items():
        if name.endswith("bias"):
            weights.tensors[name] = torch.zeros_like(tensor)


def _wrong_head(weights: Weights) -> None:
    """Tie a head that is its own; give a tied one random weights of its own."""
    if weights.config.get("tie_word_embeddings", True):
        noise = torch.randn(weights.embedding.shape, generator=torch.Generator().manual_seed(0))
        weights.untie(noise * weights.embedding.std())
    else:
        weights.untie(weights.embedding.clone())


def _interleave_rotary(weights: Weights) -> None:
    """Order the rows of each head as models do that rotate neighbours instead of halves."""
    num_heads = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    for name, tensor in weights.tensors.items():
        key = next((key for end, key in num_heads.items() if name.endswith(end)), None)
        if key is not None:
            halves = tensor.view(weights.config[key], 2, -1, tensor.shape[1])
            weights.tensors[name] = halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _rope_base(weights: Weights) -> None:
    if "rope_parameters" in weights.config:
        rope = weights.config["rope_parameters"]
        weights.config["rope_parameters"] = {**rope, "rope_theta": 50 * rope["rope_theta"]}


def _norm_epsilon(weights: Weights) -> None:
    for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        if key in weights.config:
            weights.config[key] *= 10


_DEFECTS: dict[str, Callable[[Weights], None]] = {
    "two layers exchanged": _swap_layers,
    "two matrices exchanged": _swap_tensors,
    "one matrix transposed": _transpose,
    "one matrix zero": _zero_matrix,
    "norm weights 1 (not loaded)": _ones_for_norms,
    "biases 0 (not loaded)": _no_biases,
    "output head not tied, or tied wrongly": _wrong_head,
    "rotary pairs in another order": _interleave_rotary,
    "rope base 50 times as large": _rope_base,
    "norm epsilon 10 times as large": _norm_epsilon,
}
