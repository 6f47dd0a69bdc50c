"""`tba weights diff`: how the tensors of two weight versions differ, element by element."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.errors import ConfigError
from tba.fields import escape_controls
from tba.weights.delta import ordered
from tba.weights.digest import RawTensor, bytes_of, in_parallel, open_tensors
from tba.wire.weight_manifest import DTYPE_BYTES
from tba_cli.commands.weights import chosen, open_versions, table_lines
from tba_cli.commands.weights_verify import temporary_room

CHUNK_ELEMENTS = 1 << 20
"""Bounds the memory of a comparison."""
FLOATS = ("F32", "F16", "BF16")
"""The dtypes of versions; of others only the changed elements are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """How one tensor differs. Largest and mean are over elements that changed; 0 if none did, or they are no floats."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_elements: int
    num_changed: int
    max_ulps: int
    """Largest step in units in the last place, of either sign; of -0.0 to 0.0 it is 1."""
    mean_ulps: float
    max_abs: float
    """Largest absolute change of elements that are finite in both."""
    mean_abs: float
    num_not_finite: int
    """NaN and infinite elements of the second tensor."""


def diff_command(args: argparse.Namespace) -> int:
    """Print the tensors that changed most, what appeared or vanished, and a summary."""
    place = open_versions(args)
    if args.limit < 1:
        raise ConfigError(f"--limit {args.limit} is too small; give at least 1")
    old, new = chosen(args, [args.a, args.b], place)
    manifests = [place.versions.manifest(version) for version in (old, new)]
    needed_bytes = 2 * sum(each.full_bytes for each in manifests)
    needed_bytes += max(each.delta_bytes + each.adapter_bytes for each in manifests)
    with temporary_room(needed_bytes, "comparing these versions") as folder:
        # the older one first: the newer one may be a delta of it
        first, second = sorted((old, new))
        held = place.versions.download_tensors(first, folder / "first")
        paths = {first: held.paths}
        if second != first:
            paths[second] = place.versions.download_tensors(second, folder / "second", held=[held]).paths
        before, after = open_tensors(paths[old]), open_tensors(paths[new])
        diffs = compare_tensors(before, after)
    appeared, vanished = _names(after, before), _names(before, after)
    if args.json:
        document = {"a": str(old), "b": str(new), "appeared": appeared, "vanished": vanished}
        print(json.dumps({**document, "tensors": [asdict(each) for each in diffs]}, indent=1))
        return 0
    lines = diff_lines(diffs, limit=args.limit)
    lines += [f"appeared: {text}" for text in appeared] + [f"vanished: {text}" for text in vanished]
    print("\n".join([*map(escape_controls, lines), f"{old} to {new}: {summary_text(diffs)}"]))
    return 0


def compare_tensors(before: Mapping[str, RawTensor], after: Mapping[str, RawTensor]) -> list[TensorDiff]:
    """Compare the tensors that have one name, dtype and shape in both."""
    names = [name for name, tensor in after.items() if name in before and before[name][:2] == tensor[:2]]
    size_bytes = bytes_of(after[name] for name in names)
    return in_parallel(lambda name: _compare(name, before[name][2], after[name]), names, size_bytes=size_bytes)


def _names(tensors: Mapping[str, RawTensor], others: Mapping[str, RawTensor]) -> list[str]:
    """Describe the tensors that others lack, or have in another dtype or shape."""
    return [
        f"{name} {dtype} {list(shape)}"
        for name, (dtype, shape, _) in sorted(tensors.items())
        if name not in others or others[name][:2] != (dtype, shape)
    ]


def _compare(name: str, old: NDArray[np.uint8], tensor: RawTensor) -> TensorDiff:
    dtype, shape, new = tensor
    bits = np.dtype(f"<u{DTYPE_BYTES[dtype]}")
    olds, news = old.view(bits), new.view(bits)
    num_changed = num_not_finite = num_finite_changes = max_ulps = sum_ulps = 0
    max_abs = sum_abs = 0.0
    for start in range(0, len(news), CHUNK_ELEMENTS):
        a, b = olds[start : start + CHUNK_ELEMENTS], news[start : start + CHUNK_ELEMENTS]
        where = np.flatnonzero(a != b)
        num_changed += len(where)
        if dtype not in FLOATS:
            continue
        num_not_finite += int(np.count_nonzero(~np.isfinite(_floats(b, dtype))))
        a, b = a[where], b[where]
        ulps = np.abs(ordered(b).astype(np.int64) - ordered(a))
        max_ulps, sum_ulps = max(max_ulps, int(ulps.max(initial=0))), sum_ulps + int(ulps.sum())
        with np.errstate(invalid="ignore"):  # inf - inf; it is left out below
            changes = np.abs(_floats(b, dtype).astype(np.float64) - _floats(a, dtype))
        changes = changes[np.isfinite(changes)]
        num_finite_changes, sum_abs = num_finite_changes + len(changes), sum_abs + float(changes.sum())
        max_abs = max(max_abs, float(changes.max(initial=0.0)))
    return TensorDiff(
        name=name,
        dtype=dtype,
        shape=shape,
        num_elements=len(news),
        num_changed=num_changed,
        max_ulps=max_ulps,
        mean_ulps=sum_ulps / max(1, num_changed),
        max_abs=max_abs,
        mean_abs=sum_abs / max(1, num_finite_changes),
        num_not_finite=num_not_finite,
    )


def _floats(bits: NDArray[Any], dtype: str) -> NDArray[np.floating]:
    """Return the floats that the bits mean."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32 if dtype == "F32" else np.float16)


def diff_lines(diffs: Sequence[TensorDiff], *, limit: int) -> list[str]:
    """Return a table of the tensors that changed, those with the largest share of changed elements first."""
    changed = [each for each in diffs if each.num_changed]
    if not changed:
        return []
    shown = sorted(changed, key=lambda each: -each.num_changed / each.num_elements)[:limit]
    rows = [("tensor", "dtype", "elements", "changed", "mean ulps", "max ulps", "mean |change|", "max |change|")]
    rows += [
        (
            each.name,
            each.dtype,
            f"{each.num_elements:,}",
            _share(each.num_changed, each.num_elements),
            *(f"{value:.3g}" for value in (each.mean_ulps, each.max_ulps, each.mean_abs, each.max_abs)),
        )
        for each in shown
    ]
    more = len(changed) - len(shown)
    return table_lines(rows, right=range(2, 8)) + ([f"and {more} that changed less (--limit)"] if more else [])


def summary_text(diffs: Sequence[TensorDiff]) -> str:
    """Return all tensors in one sentence."""
    num_changed, num_elements = (sum(getattr(each, name) for each in diffs) for name in ("num_changed", "num_elements"))
    num_touched = sum(each.num_changed > 0 for each in diffs)
    text = (
        f"{_share(num_changed, num_elements)} of {num_elements:,} elements changed, in {num_touched} of {len(diffs)} "
    )
    floats = [each for each in diffs if each.num_changed and each.dtype in FLOATS]
    if not floats:
        return f"{text}tensors"
    mean_ulps = sum(each.mean_ulps * each.num_changed for each in floats) / sum(each.num_changed for each in floats)
    text += f"tensors, by {mean_ulps:.3g} ulps in the mean and {max(each.max_ulps for each in floats):,} at most (in "
    text += f"absolute terms {max(each.max_abs for each in floats):.3g})"
    num_not_finite = sum(each.num_not_finite for each in diffs)
    return text + (f"; {num_not_finite} elements of the second are NaN or infinite" if num_not_finite else "")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.3g} %"
