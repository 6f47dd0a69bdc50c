"""What transformers says about the weights that it loaded: whether the model is the one in the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba.errors import ModelError


def check_load_report(
    report: Mapping[str, Any], model: Any, *, where: str, is_needed: Callable[[str], bool] = lambda name: True
) -> None:
    """Refuse a model that transformers filled up with random numbers.

    Args:
        report: `output_loading_info` of a `from_pretrained` with `ignore_mismatched_sizes`.
        model: what it returned.
        where: the folder and the key that names it, for the error.
        is_needed: whether the weight of this name has to come from the files; default: each one has.

    Raises:
        ModelError: weights are missing, or have other shapes than config.json says; it names them.
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
