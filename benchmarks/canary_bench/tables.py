"""Markdown tables of the results of benchmarks/canary.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tba_trainer.checkpoints import canary

from benchmarks.canary_bench.gaps import STATISTICS
from benchmarks.canary_bench.measure import NOISE
from tba.config.trainer import TrainerSection

ENGINES = ("embedded", "embedded, wide", "vllm", "vllm, wide")
"""The comparisons that a tolerance must let pass."""
CANARY = "8+8"
"""The layout of the product."""
OWN_GAP = "masters"
FIXED = {"float32": 2e-3, "float16": 0.03, "bfloat16": 0.25}
"""The tolerances of releases that had one for each dtype."""
Document = dict[str, Any]


def report_text(documents: Sequence[Document]) -> str:
    """Return all tables."""
    parts = [noise_table(documents), models_table(documents), signal_table(documents)]
    notes = [f"* {document['name']}: {note}" for document in documents for note in document["notes"]]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def tolerances(document: Document, dtype: str) -> NDArray[np.float64]:
    """Return the tolerance of every canary of a model, by the trainer's own gaps of the candidates around it."""
    least = max(canary.MIN_TOLERANCE[dtype], TrainerSection.model_fields["canary_tolerance"].default)
    found = [
        np.full(len(gaps), canary.tolerance(float(np.median(gaps)), least=least, most=canary.MAX_TOLERANCE[dtype]))
        for gaps in _groups(_own_gaps(document, dtype))
    ]
    return np.concatenate(found)


def chosen(document: Document, dtype: str) -> NDArray[np.int64]:
    """Return which canaries a trainer would take, each out of so many candidates."""
    groups = _groups(_own_gaps(document, dtype))
    starts = np.cumsum([0, *(len(gaps) for gaps in groups[:-1])])
    return starts + np.array([np.argmin(gaps) for gaps in groups])


def _groups(gaps: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return np.array_split(gaps, max(1, len(gaps) // canary.NUM_CANDIDATES))


def noise_table(documents: Sequence[Document]) -> str:
    """Return the gaps of all canaries of all models with the right weights, by dtype and comparison."""
    rows = []
    for dtype in _dtypes(documents):
        for pair, label in NOISE.items():
            cells = []
            for layout, statistic in ((CANARY, "max"), ("16+47", "max"), ("16+47", "median")):
                values = _noise(documents, dtype, [pair], layout, statistic)
                if values.size:
                    cells += [_number(v) for v in (np.median(values), values.max())]
            if cells:
                rows.append([dtype, label, *cells])
    heads = [
        f"{way}{end}" for way in ("8+8, max: ", "16+47, max: ", "16+47, median: ") for end in ("median", "largest")
    ]
    return _table(("dtype", "compared with the canary", *heads), rows)


def models_table(documents: Sequence[Document]) -> str:
    """Return, by model and dtype, what engines are off by, what the trainer's own gap is, and what follows from it."""
    rows = []
    for document in documents:
        for dtype in _dtypes([document]):
            noise, limits, taken = document["noise"][dtype], tolerances(document, dtype), chosen(document, dtype)
            cells = [_number(np.max(noise[pair][CANARY])) if pair in noise else "" for pair in ("embedded", "vllm")]
            own = _own_gaps(document, dtype)
            cells += [_span(own), _span(own[taken]), _span(limits[taken])]
            right = [_statistic(noise[pair][CANARY], "max") for pair in ENGINES if pair in noise]
            cells.append(f"{np.mean([values > FIXED[dtype] for values in right]):.3f}")
            cells.append(f"{np.mean([values > limits for values in right]):.3f}")
            cells.append(f"{np.mean([values[taken] > limits[taken] for values in right]):.3f}")
            rows.append([document["name"], dtype, *cells])
    heads = (
        "embedded",
        "vLLM",
        "own gap",
        "of the chosen",
        "its tolerance",
        "right: refused at the fixed",
        "by own gap",
        "chosen",
    )
    return _table(("model", "dtype", *heads), rows)


def signal_table(documents: Sequence[Document]) -> str:
    """Return the gaps of wrong weights, and the share of canaries that the tolerances refuse, by both rules."""
    dtypes = _dtypes(documents)
    rows = []
    for defect in _defects(documents):
        cells = []
        for dtype in dtypes:
            values, limits = (np.concatenate(each) for each in zip(*_signals(documents, dtype, defect), strict=True))
            if not values.size:
                cells += ["", "", ""]
                continue
            refused, fixed = np.mean(values > limits), np.mean(values > FIXED[dtype])
            cells += [f"{_number(np.median(values))} ({_number(values.min())})", f"{refused:.2f}", f"{fixed:.2f}"]
        rows.append([defect, *cells])
    heads = [head for dtype in dtypes for head in (f"{dtype}: gap", "refused", f"at {FIXED[dtype]:g}")]
    return _table(("wrong", *heads), rows)


def _dtypes(documents: Sequence[Document]) -> list[str]:
    return list(documents[0]["noise"])


def _defects(documents: Sequence[Document]) -> list[str]:
    found = [name for document in documents for name in document["signal"]["embedded"]["float32"]]
    return list(dict.fromkeys(found))


def _statistic(gaps: Sequence[Sequence[float]], name: str) -> NDArray[np.float64]:
    """Return one number for each canary, of its tokens."""
    return STATISTICS[name](np.array(gaps), axis=1)


def _noise(documents: Sequence[Document], dtype: str, pairs: Iterable[str], layout: str, name: str) -> NDArray[Any]:
    found = [document["noise"][dtype].get(pair) for document in documents for pair in pairs]
    return np.concatenate([np.zeros(0), *(_statistic(gaps[layout], name) for gaps in found if gaps is not None)])


def _signals(
    documents: Sequence[Document], dtype: str, defect: str
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the gaps of every engine of every model, and the tolerances of their canaries."""
    found = [(np.zeros(0), np.zeros(0))]
    for document in documents:
        limits = tolerances(document, dtype)
        for dtypes in document["signal"].values():
            if (gaps := dtypes.get(dtype, {}).get(defect)) is not None:
                values = _statistic(gaps[CANARY], "max")
                found.append((values, limits[: len(values)]))
    return found


def _own_gaps(document: Document, dtype: str) -> NDArray[np.float64]:
    noise = document["noise"][dtype]
    if OWN_GAP not in noise:  # in float32 nothing is rounded
        return np.zeros(len(noise["embedded"][CANARY]))
    return _statistic(noise[OWN_GAP][CANARY], "max")


def _span(values: NDArray[np.float64]) -> str:
    return f"{_number(values.min())} to {_number(values.max())}" if values.size else ""


def _number(value: float | np.floating) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.1f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
