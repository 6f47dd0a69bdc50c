"""`tba run` and the commands with the real buffer and reward services; only trainer and searchers are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.local_workplace import DEADLINE_S, FAKES, ROOT, Workplace, wait_until


def path_with_real_services(tmp_path: Path) -> str:
    """A PYTHONPATH whose buffer and reward are real and whose trainer and searcher are stand-ins."""
    links = tmp_path / "packages"
    links.mkdir()
    for name, source in {
        "tba_buffer": ROOT / "services" / "buffer",
        "tba_reward": ROOT / "services" / "reward",
        "tba_trainer": FAKES,
        "tba_searcher": FAKES,
    }.items():
        (links / name).symlink_to(source / name)
    return f"{links}:{ROOT}"


def test_a_run_is_looked_at_paused_resumed_stopped_and_written_up(tmp_path):
    place = Workplace(tmp_path)
    place.environ["PYTHONPATH"] = path_with_real_services(tmp_path)
    started = place.start("--set", "trainer.export=false", FAKE_TRAINER="no-steps")
    try:
        wait_until("the run is going", lambda: (place.folder / "logs" / "trainer.log").exists())
        wait_until(
            "its lineage", lambda: place.tba("status").stdout.startswith("run 'demo': running, step 0, lineage 1")
        )
        status = json.loads(place.tba("status", "--json").stdout)
        assert (status["stats"]["num_prompts_train"], status["stats"]["num_prompts_heldout"]) == (1, 1)
        assert "paused (lunch)" in place.tba("pause", "--reason", "lunch").stdout
        assert place.tba("resume").stdout.startswith("run 'demo': running")
        assert "0 new and 2 known prompts" in place.tba("prompts", "upload", "prompts.jsonl").stdout
        assert place.tba("ledger", "check").returncode == 0
        refused = place.tba("prompts", "upload", "missing.jsonl")
        assert refused.returncode == 2
        assert place.tba("stop", "--reason", "enough").returncode == 0
        out, err = started.communicate(timeout=DEADLINE_S)
    finally:
        place.close()
    assert started.returncode == 0, out + err
    assert place.summary()["steps"] == 0
    assert place.summary()["final_accuracy"] is None
    assert "pass@1 sampled: unknown -> unknown" in out
    assert place.children() == []
