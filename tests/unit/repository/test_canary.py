"""benchmarks/canary.py: the tolerances of canaries lie between rounding and wrong weights, and the tables say so."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.canary_bench.gaps import LAYOUTS, Canaries
from benchmarks.canary_bench.measure import measure_torch
from benchmarks.canary_bench.tables import report_text, tolerance
from tests.support.tiny_model import make_tiny_model

GROSS = ("two layers exchanged", "one matrix zero", "output head not tied, or tied wrongly", "biases 0 (not loaded)")


def test_a_tolerance_lets_rounding_pass_and_refuses_gross_defects(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture="llama", hidden_size=64)
    found = measure_torch(
        "tiny", folder, tmp_path / "wrong", dtypes=["float32", "bfloat16"], num_canaries=6, num_signal=2
    )
    for dtype in ("float32", "bfloat16"):
        noise = found.noise[dtype]["embedded"]["8+8"]["max"]
        assert len(noise) == 6
        assert max(noise) < tolerance(dtype)
        signal = found.signal["embedded"][dtype]
        assert "biases 0 (not loaded)" not in signal  # this model has none: nothing would differ
        assert all(min(signal[name]["8+8"]["max"]) > tolerance(dtype) for name in GROSS if name in signal)
    assert min(found.signal["embedded"]["float32"]["the version before, lr 1e-03"]["8+8"]["max"]) > tolerance("float32")
    assert "| bfloat16 | embedded engine |" in report_text([found.document()])


def test_the_first_canary_is_the_trainers_own() -> None:
    canaries = Canaries.make(1000, 2)
    own = np.random.default_rng(0).integers(0, 1000, 16, dtype=np.int32)
    (prompt, response), _ = canaries.pairs("8+8")
    assert np.concatenate([prompt, response]).tolist() == own.tolist()
    assert all(canaries.tokens[name].shape == (2, sum(sizes)) for name, sizes in LAYOUTS.items())
