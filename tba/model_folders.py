"""Checks of model folders in Hugging Face format, and of models that transformers has loaded. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.errors import ConfigError, ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Every folder that `tokenizer.save_pretrained` wrote has at least one of these files."""


def check_tokenizer(folder: str | Path, *, key: str = "model.path") -> None:
    """Check before a run starts that a model folder has a tokenizer; without one, every searcher would fail.

    Args:
        key: the recipe's key that names the folder, for errors.

    Raises:
        ConfigError: the folder has no tokenizer.
    """
    # each of these files is enough for some tokenizer class; which one, only transformers knows
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{key} {folder} holds no tokenizer ({', '.join(TOKENIZER_FILES[:3])}); save it there with "
            "tokenizer.save_pretrained(...)"
        )


def check_vocabulary(tokenizer: Any, vocab_size: int, *, where: str) -> None:
    """Raise ModelError if the tokenizer can turn plain text into ids for which the model has no embedding."""
    # a special one, as for images or padding, is in few texts or none: the engine refuses a request that has it
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    beyond = sorted(t for t, i in tokenizer.get_vocab().items() if i >= vocab_size and i not in special)
    if beyond:
        raise ModelError(
            f"the tokenizer of {where} has {len(beyond)} tokens beyond {vocab_size} of the model, as {beyond[0]!r}; "
            "call model.resize_token_embeddings(len(tokenizer)) and save the model again, or remove these tokens"
        )


def trust_hint(error: Exception) -> str:
    """Return the remedy, to append to a message, if transformers refused a model with code of its own; else ""."""
    if "trust_remote_code" not in str(error):
        return ""
    return "; if that code may run, set model.trust_remote_code = true (trust_remote_code of a scorer for its models)"


def check_embedding_model(folder: str | Path | None) -> None:
    """Check before a run starts that the folder of `eval.embedding_model`, if one is given, holds a model.

    Raises:
        ConfigError: the folder has no tokenizer or no config.json.
    """
    if folder is not None:
        check_tokenizer(folder, key="eval.embedding_model")
    if folder is not None and not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"eval.embedding_model {str(folder)!r} holds no config.json; give the folder of a Hugging Face encoder"
        )


def check_load_report(
    report: Mapping[str, Any], model: Any, *, where: str, is_needed: Callable[[str], bool] = lambda name: True
) -> None:
    """Refuse a loaded model whose files lack weights, which transformers then fills with random numbers.

    Args:
        report: `output_loading_info` of a `from_pretrained` with `ignore_mismatched_sizes`.
        model: the model that `from_pretrained` returned.
        where: the folder and the key that names it, for the error.
        is_needed: returns whether the weight of this name must come from the files; default: every weight must.

    Raises:
        ModelError: weights are missing, unreadable, or have other shapes than config.json says; it names them.
    """
    missing = sorted(filter(is_needed, report["missing_keys"]))
    shapes = [f"{name} {list(is_)}, not {list(should)}" for name, is_, should in sorted(report["mismatched_keys"])]
    shapes = list(filter(is_needed, shapes))
    if missing:
        unexpected = sorted(report["unexpected_keys"])
        # most often they are there under another name, as that of a wrapper (`_orig_mod.`)
        hint = f", and has some that such a model has not: {_some(unexpected)}" if unexpected else ""
        problem = f"lacks weights of a {type(model).__name__}: {_some(missing)}{hint}; is it another kind of model?"
        raise ModelError(f"{where} {problem} Save it with save_pretrained of the bare model, or correct config.json")
    if shapes:
        raise ModelError(
            f"{where} holds weights of other shapes than its config.json says: {_some(shapes)}; correct config.json"
        )
    if report["error_msgs"]:
        raise ModelError(f"{where} holds weights that cannot be read: {str(report['error_msgs'])[:500]}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
