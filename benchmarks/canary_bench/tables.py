"""Markdown tables of the results of benchmarks/canary.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tba_trainer.checkpoints.weight_files import MIN_TOLERANCE

from benchmarks.canary_bench.gaps import LAYOUTS
from benchmarks.canary_bench.measure import NOISE
from tba.config.trainer import TrainerSection

ENGINES = ("embedded", "embedded, wide", "vllm", "vllm, wide")
"""The comparisons of which a tolerance must let all pass."""
SINGLE = ("8+8", "max")
"""The canary's layout and statistic that the product uses."""
ALTERNATIVES = (SINGLE, ("8+8", "mean"), ("16+47", "max"), ("16+47", "mean"))
MARGIN = 2.0
"""Of the tolerances in the table of alternatives: times the largest gap by rounding."""
Document = dict[str, Any]


def report_text(documents: Sequence[Document]) -> str:
    """Return all tables."""
    parts = [noise_table(documents), models_table(documents), signal_table(documents), alternatives_table(documents)]
    notes = [f"* {document['name']}: {note}" for document in documents for note in document["notes"]]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def tolerance(dtype: str) -> float:
    """Return the tolerance of the manifests of a dtype, with the recipe's default."""
    return max(MIN_TOLERANCE[dtype], TrainerSection.model_fields["canary_tolerance"].default)


def noise_table(documents: Sequence[Document]) -> str:
    """Return the gaps of all canaries of all models with the right weights, by dtype and comparison."""
    rows = []
    for dtype in _dtypes(documents):
        for pair, label in NOISE.items():
            cells = []
            for layout, statistic in (SINGLE, ("16+47", "mean")):
                values = _noise(documents, dtype, [pair], layout, statistic)
                if values.size:
                    cells.append([_number(v) for v in (np.median(values), np.quantile(values, 0.99), values.max())])
            if cells:
                rows.append([dtype, label, *cells[0], *cells[1]])
    names = ("8+8, max: median", "99 %", "largest", "16+47, mean: median", "99 %", "largest")
    return _table(("dtype", "compared with the canary", *names), rows)


def models_table(documents: Sequence[Document]) -> str:
    """Return the largest gap of any token by model, dtype and comparison."""
    pairs = {"embedded": "embedded", "vllm": "vLLM", "rounded computation": "in float32"}
    rows = []
    for document in documents:
        for dtype in _dtypes(documents):
            cells = []
            for layout in LAYOUTS:
                for pair in pairs:
                    values = _noise([document], dtype, [pair], layout, "max")
                    cells.append(_number(values.max()) if values.size else "")
            rows.append([document["name"], dtype, *cells])
    return _table(("model", "dtype", *(f"{layout}, {label}" for layout in LAYOUTS for label in pairs.values())), rows)


def signal_table(documents: Sequence[Document]) -> str:
    """Return the gaps of wrong weights, and the share of canaries that today's tolerance refuses."""
    dtypes = _dtypes(documents)
    rows = []
    for defect in _defects(documents):
        cells = []
        for dtype in dtypes:
            values = _signal(documents, dtype, defect, *SINGLE)
            caught = float(np.mean(values > tolerance(dtype)))
            cells += [f"{_number(np.median(values))} ({_number(values.min())})", f"{caught:.2f}"]
        rows.append([defect, *cells])
    heads = [head for dtype in dtypes for head in (f"{dtype}: gap", f"refused at {tolerance(dtype):g}")]
    return _table(("wrong", *heads), rows)


def alternatives_table(documents: Sequence[Document]) -> str:
    """Return, for other canaries and statistics, what a tolerance above all noise would refuse."""
    rows = []
    for dtype in _dtypes(documents):
        limits = {way: MARGIN * _noise(documents, dtype, ENGINES, *way).max() for way in ALTERNATIVES}
        rows.append([f"{dtype}: tolerance", *(_number(limits[way]) for way in ALTERNATIVES)])
        for defect in _defects(documents):
            shares = [np.mean(_signal(documents, dtype, defect, *way) > limit) for way, limit in limits.items()]
            rows.append([f"{dtype}: {defect}", *(f"{share:.2f}" for share in shares)])
    return _table(("refused", *(f"{layout}, {statistic}" for layout, statistic in ALTERNATIVES)), rows)


def _dtypes(documents: Sequence[Document]) -> list[str]:
    return list(documents[0]["noise"])


def _defects(documents: Sequence[Document]) -> list[str]:
    found = [name for document in documents for name in document["signal"]["embedded"]["float32"]]
    return list(dict.fromkeys(found))


def _noise(documents: Sequence[Document], dtype: str, pairs: Iterable[str], layout: str, statistic: str) -> np.ndarray:
    found = [document["noise"][dtype].get(pair) for document in documents for pair in pairs]
    return np.array([value for gaps in found if gaps is not None for value in gaps[layout][statistic]])


def _signal(documents: Sequence[Document], dtype: str, defect: str, layout: str, statistic: str) -> np.ndarray:
    found = [dtypes.get(dtype, {}).get(defect) for document in documents for dtypes in document["signal"].values()]
    return np.array([value for gaps in found if gaps is not None for value in gaps[layout][statistic]])


def _number(value: float | np.floating) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.1f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
