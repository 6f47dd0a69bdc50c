"""benchmarks/canary.py: the tolerances of canaries lie between rounding and wrong weights, and the tables say so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tba_trainer.checkpoints.canary import NUM_CANDIDATES, PROMPT_TOKENS, RESPONSE_TOKENS, candidate

from benchmarks.canary_bench.gaps import LAYOUTS, Canaries
from benchmarks.canary_bench.measure import measure_torch
from benchmarks.canary_bench.tables import report_text, tolerances
from tests.support.tiny_model import make_tiny_model

GROSS = ("two layers exchanged", "one matrix zero", "output head not tied, or tied wrongly", "biases 0 (not loaded)")


def test_a_tolerance_lets_rounding_pass_and_refuses_gross_defects(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture="llama", hidden_size=64)
    measured = measure_torch(
        "tiny", folder, tmp_path / "wrong", dtypes=["float32", "bfloat16"], num_canaries=6, num_signal=2
    )
    document = measured.document()
    for dtype in ("float32", "bfloat16"):
        limits = tolerances(document, dtype)
        noise = document["noise"][dtype]["embedded"]["8+8"]
        assert len(noise) == 6
        assert np.max(noise) < limits.min()
        signal = document["signal"]["embedded"][dtype]
        assert "biases 0 (not loaded)" not in signal  # this model has none: nothing would differ
        assert all(np.max(signal[name]["8+8"], axis=1).min() > limits.max() for name in GROSS if name in signal)
    assert len(tolerances(document, "bfloat16")) == 6
    older = document["signal"]["embedded"]["float32"]["the version before, lr 1e-03"]["8+8"]
    assert np.max(older, axis=1).min() > tolerances(document, "float32").max()
    assert np.max(document["signal"]["embedded"]["float32"]["products in TF32 (emulated)"]["8+8"]) > 1e-4
    assert "| bfloat16 | embedded engine |" in report_text([document])


def test_the_first_canaries_are_the_trainers_candidates() -> None:
    canaries = Canaries.make(1000, NUM_CANDIDATES)
    assert LAYOUTS["8+8"] == (PROMPT_TOKENS, RESPONSE_TOKENS)
    for seed, (prompt, response) in enumerate(canaries.pairs("8+8")):
        assert np.concatenate([prompt, response]).tolist() == candidate(seed, 1000).tolist()
    assert all(canaries.tokens[name].shape == (NUM_CANDIDATES, sum(sizes)) for name, sizes in LAYOUTS.items())
