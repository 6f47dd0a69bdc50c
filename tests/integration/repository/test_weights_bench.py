"""benchmarks/weights.py in small: a real model, a real S3 server, four searchers; and that it notices wrong results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import weights
from benchmarks.weights_bench import formats
from benchmarks.weights_bench.formats import Format
from benchmarks.weights_bench.states import num_parameters, tiled
from benchmarks.weights_bench.training import State


def made_states() -> tuple[State, State]:
    """All elements have one exponent; half of them change, by one step."""
    rng = np.random.default_rng(0)
    old = {"matrix": rng.integers(0x3F80, 0x3FF0, (64, 32), dtype=np.uint16), "vector": np.full(8, 0x3F80, np.uint16)}
    new = {name: bits + (np.arange(bits.size).reshape(bits.shape) % 2).astype(np.uint16) for name, bits in old.items()}
    return old, new


def test_a_small_run_fills_every_table(tmp_path: Path) -> None:
    sizes = ["--pretrain=1", "--before=0", "--distances=1", "--learning-rates=3e-6", "--rounds=1"]
    larger = ["--parameters=1", "--fleet-parameters=1", "--searchers=2", f"--states={tmp_path}"]
    sections = ["--sections", "codec", "publish", "fleet"]
    document = weights.measure(weights.parser().parse_args([*sizes, *larger, *sections]))
    (row,) = document["codec"]["rows"]
    size = row["bytes"]
    assert 0 < size["changed_share"] < 0.2
    assert size["floor"] < size["tba"] < size["xor+zstd"] < size["index+value"] < size["full"]
    assert document["fleet"]["full"]["bytes_per_searcher"] > size["full"]
    assert size["tba"] < document["fleet"]["delta"]["bytes_per_searcher"] < size["full"] / 20
    assert document["publish"]["delta"]["stored_bytes"] == document["publish"]["delta"]["downloaded_bytes"]
    text = weights.report(document)
    assert text.count("| 3e-06 | 1 |") == 2
    assert "| 2 | delta |" in text
    assert sum("times smaller" in line for line in weights.judged(document["codec"]["rows"])) == 2


def test_the_floor_is_the_entropy() -> None:
    old, new = made_states()
    # a bit for each element says whether it changed; every step is the same, and needs none
    assert formats.sizes(old, new)["floor"] == pytest.approx(num_parameters(old) / 8)


def test_a_large_state_has_the_changes_of_the_small_one_in_other_places() -> None:
    old, new = tiled(*made_states(), 5_000, seed=0)
    small, large = formats.sizes(*made_states()), formats.sizes(old, new)
    assert large["full"] == 3 * small["full"]
    assert large["changed_share"] == small["changed_share"]
    copies = np.split(old["matrix"], 3)
    assert not np.array_equal(copies[0], copies[1])
    assert np.array_equal(np.sort(copies[0], axis=None), np.sort(copies[1], axis=None))


def test_a_format_that_gives_other_bits_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful = Format(lambda old, new: old, lambda encoded, base, out: np.copyto(out, base), len)
    monkeypatch.setattr(formats, "FORMATS", {"forgetful": forgetful})
    with pytest.raises(SystemExit, match="forgetful gives other bits back"):
        formats.speeds(*made_states(), num_rounds=1)
