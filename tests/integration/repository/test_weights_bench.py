"""benchmarks/weights.py in small, with a real S3 server; and that it notices wrong bits."""

from __future__ import annotations

import pytest

from benchmarks import weights
from benchmarks.weights_bench.states import CHANGED_SHARE, made_states


@pytest.mark.nightly
def test_a_small_run_fills_every_table() -> None:
    args = ["--parameters=200000", "--rounds=1", "--sections", "codec", "publish"]
    document = weights.measure(weights.parser().parse_args(args))
    delta, full = (document["publish"][kind] for kind in ("delta", "full"))
    assert delta["stored_bytes"] == delta["downloaded_bytes"] < full["downloaded_bytes"] / 20
    assert document["codec"]["times_smaller"] > 20
    text = weights.report(document)
    assert "| decode a delta |" in text
    assert "| delta | " in text


def test_versions_differ_in_the_stated_share() -> None:
    old, new = made_states(400_000)
    num_changed = sum(int((bits != new[name]).sum()) for name, bits in old.items())
    assert num_changed / sum(bits.size for bits in old.values()) == pytest.approx(CHANGED_SHARE, rel=0.1)


def test_other_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "apply_tensor", lambda *_: None)
    with pytest.raises(SystemExit, match="gives other bits back"):
        weights.codec(*made_states(50_000), 1)
