"""Model folders whose weights do not fit config.json; transformers would fill in random numbers without an error."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

BREAKS = {
    "a wrapper's names": r"lacks weights of a LlamaForCausalLM: lm_head\.weight.* _orig_mod\.",
    "no head": r"lacks weights of a LlamaForCausalLM: lm_head\.weight;",
    "one layer too few": r"lacks weights of a LlamaForCausalLM: model\.layers\.2\..* and 6 more;",
    "another shape": r"other shapes than its config.json says: lm_head\.weight \[33, 64\], not \[34, 64\]",
}
"""How a folder of `make_tiny_model` is broken -> a regular expression of the expected error."""


def break_weights(folder: Path, how: str) -> Path:
    """Break the weights in the folder as `how` says (a key of BREAKS); return the folder."""
    path = folder / "model.safetensors"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(path)
    if how == "a wrapper's names":
        tensors = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    elif how == "no head":
        del tensors["lm_head.weight"]
    elif how == "one layer too few":
        config["num_hidden_layers"] += 1
    else:
        config["vocab_size"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
