"""The route of a rollout: the files that a real run goes through are those that docs/architecture.md walks through."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tba_buffer.storage.context import PRELUDES

from tests.e2e.conftest import MakePlace
from tests.support.buffer import SERVICE_PATHS
from tests.support.e2e import ENDLESS, Place
from tests.support.waits import until

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "tests" / "support" / "route_hook"
MAX_FILES, MAX_WITH_PUBLICATION = 76, 94
"""From lease to gradient, and to the swap of weights, in Python and Lua. The numbers only fall."""
NUM_STEPS = 8
"""Steps that are recorded: several publications, and every kind of draw."""

ROUTE = {
    "lease": "SearcherLoop._lease_task BufferClient.lease prompts_router.<locals>.lease",
    "generation": "SearcherLoop._engine_task EngineThread._call.<locals>.work",
    "score": "Delivery.score_forever RewardClient.score build_app.<locals>.score RewardService.score "
    "RewardService._score_task RewardComponent.score InlineScorer.score.<locals>.score_chunk",
    "push": "Delivery.push_forever BufferClient.push training_router.<locals>.push IndexView.catch_up",
    "draw": "Prefetcher._poll BufferClient.draw_batch training_router.<locals>.draw_batch",
    "gradient": "TrainingLoop._one_step",
    "ack": "TrainingLoop._ack training_router.<locals>.ack",
    "publication": "WeightSnapshotWriter.take Publisher._publish training_router.<locals>.announce_version",
    "weights": "VersionPulls.pull_forever WeightLoader.download swap_weights",
}
"""Step of the route -> the functions with which it begins, in tasks, threads and handlers of requests."""
TO_GRADIENT = ("lease", "generation", "score", "push", "draw", "gradient")
SCRIPTS = "Scripts.run_with"
"""Runs the scripts of Redis."""
BESIDE = (
    "TrackerGroup.step StepRecord.log Metrics.record_results Metrics.record_outcomes RepeatLimit.__call__ "
    "_in_order.<locals>.order"
)
"""Metrics, trackers and log lines; no rollout goes through them."""
AT_TIMES = {
    # when a request meets a new connection to Redis
    "tba/config/redis.py",
    "services/buffer/tba_buffer/run/accept_loss.py",
    # when a delta is tried again: one publication in `DeltaSettings.keyframe_interval`, where deltas do not pay
    "tba/weights/delta.py",
    # when a draw has to wait for rollouts
    "tba/errors.py",
    "services/buffer/tba_buffer/run/components.py",
}
PREFIXES = {
    "B": "services/buffer/tba_buffer",
    "S": "services/searcher/tba_searcher",
    "R": "services/reward/tba_reward",
    "T": "services/trainer/tba_trainer",
}


def last_step(place: Place) -> int:
    """The last line of the metrics; -1 before there is one."""
    path = place.folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


@pytest.fixture(scope="module")
def recorded(make_place: MakePlace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Files of the product on the route of a real run's rollouts -> the functions of ROUTE that led to them."""
    folder = tmp_path_factory.mktemp("route")
    place = make_place(
        trainer={"num_steps": ENDLESS, "checkpoint_interval": ENDLESS},
        environ={
            "PYTHONPATH": os.pathsep.join(map(str, [HOOK, *SERVICE_PATHS])),
            "ROUTE_FOLDER": str(folder),
            "ROUTE_ROOTS": " ".join(ROUTE.values()),
            "ROUTE_BESIDE": BESIDE,
            "ROUTE_SCRIPTS": SCRIPTS,
        },
    )
    place.start()
    first = until("the run trains", lambda: max(0, last_step(place) - 2))
    (folder / "start").touch()
    until("some steps are recorded", lambda: last_step(place) > first + 2 + NUM_STEPS)
    (folder / "stop").touch()
    on = {path.stem for path in folder.glob("*.on")}
    until("every process has written", lambda: on == {path.stem for path in folder.glob("*.route")})
    place.close()
    found: dict[str, set[str]] = {}
    for path in folder.glob("*.route"):
        for line in path.read_text().splitlines():
            name, function, root = line.split("\t")
            if name.endswith(".lua"):
                # as Scripts puts them together
                script = name.removesuffix(".lua")
                for part in (script, *(f"preludes/{prelude}" for prelude in PRELUDES.get(script, ()))):
                    found.setdefault(f"{PREFIXES['B']}/storage/lua/{part}.lua", set()).add(root)
            elif Path(name).is_relative_to(ROOT) and function != "<module>":
                found.setdefault(str(Path(name).relative_to(ROOT)), set()).add(root)
    return found


def walked() -> set[str]:
    section = re.search(r"^## One rollout.*?(?=^## )", (ROOT / "docs" / "architecture.md").read_text(), re.M | re.S)
    assert section is not None
    names = re.findall(r"`((?:[BSRT]|tba)/[\w/]+\.(?:py|lua))`", section[0])
    return {re.sub(r"^([BSRT])/", lambda found: PREFIXES[found[1]] + "/", name) for name in names}


def test_every_step_of_the_route_was_recorded(recorded: dict[str, set[str]]) -> None:
    assert {root for roots in ROUTE.values() for root in roots.split()} == set().union(*recorded.values())


def test_the_route_of_a_rollout_is_short(recorded: dict[str, set[str]]) -> None:
    roots = {root for step in TO_GRADIENT for root in ROUTE[step].split()}
    until_gradient = sorted(file for file, led in recorded.items() if led & roots and file not in AT_TIMES)
    assert len(until_gradient) <= MAX_FILES, " ".join(until_gradient)
    assert len(recorded.keys() - AT_TIMES) <= MAX_WITH_PUBLICATION


def test_the_page_walks_through_the_files_that_run_and_no_others(recorded: dict[str, set[str]]) -> None:
    named = walked()
    assert {"not on the page": set(recorded) - named - AT_TIMES, "did not run": named - set(recorded)} == {
        "not on the page": set(),
        "did not run": set(),
    }
