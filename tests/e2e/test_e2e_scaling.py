"""`tba scale` while a real run trains: searchers come and go, and nothing of what they made is lost."""

from __future__ import annotations

from tba.api import RunInfo
from tests.e2e.conftest import MakePlace
from tests.support.e2e import ENDLESS, decode_all, open_leases, stored_rollouts, until


def pushing(info: RunInfo) -> set[str]:
    """The searchers that are alive and have pushed."""
    found = (item for item in info.components if item.kind == "searcher" and item.alive and item.state == "running")
    return {item.component_id for item in found if item.gauges.get("rollouts_pushed", 0) > 0}


def test_searchers_come_and_go_while_the_trainer_trains(make_place: MakePlace) -> None:
    place = make_place(
        trainer={"num_steps": ENDLESS, "export": False}, searcher={"num_searchers": 1}, eval={"num_prompts_final": 4}
    )
    started = place.start()
    place.until("the first one pushes", lambda info: info.step >= 2 and len(pushing(info)) == 1)
    up = place.control("scale", "3", "--reason", "night")
    assert up.returncode == 0, up.stderr
    assert "searchers: 3 desired (asked for by the operator), " in up.stdout
    place.until("all three push", lambda info: len(pushing(info)) == 3)
    before = stored_rollouts(place.redis_url())

    down = place.control("scale", "1")
    assert down.returncode == 0, down.stderr
    step = place.until("searcher-0 alone is left", lambda info: pushing(info) == {"searcher-0"}).step
    place.until("training continues", lambda info: info.step >= step + 5)
    redis_url = place.redis_url()
    for name in ("searcher-1", "searcher-2"):  # drained, not lost
        until(f"{name} has ended", lambda name=name: f"{name} was stopped (exit code 0)" in started.out)
        assert not open_leases(redis_url, name)
    client = place.client()
    stats, info = client.stats(), client.scaling()
    client.close()
    assert stats.leases["expired"] == 0
    assert stats.pushed["refused"] == 0
    after = stored_rollouts(redis_url)
    assert {rollout_id: after.get(rollout_id) for rollout_id in before} == before
    assert {rollout.searcher_id for rollout in decode_all(before)} == {f"searcher-{i}" for i in range(3)}
    assert [(change.old, change.new, change.reason) for change in info.changes] == [(None, 3, "night"), (3, 1, None)]
    assert place.control("stop").returncode == 0
    assert started.wait() == 0, started.err
    assert "warning: searcher" not in started.out
