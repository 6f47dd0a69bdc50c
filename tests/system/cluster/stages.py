"""The stages of the cluster test, in order; each one prints what it found and how long it took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.system.cluster.kube import StageError, get, minutes, run, until
from tests.system.cluster.release import KINDS, Release

FIRST_STEP_LIMIT_S = 180.0
STEPS_AFTER_A_KILL = 3
RECOVERY_DEADLINE_S = 240.0


@dataclass
class Report:
    """The results: a line per stage, for people and as JSON."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a stage; what is put into the dictionary is shown.

        Raises:
            StageError: the stage failed; it is named.
        """
        begun_s, found = time.monotonic(), {}
        try:
            yield found
        except StageError as error:
            raise StageError(f"in stage {name!r}: {error}") from None
        self.rows.append({"stage": name, "seconds": round(time.monotonic() - begun_s, 1), **found})
        more = ", ".join(f"{key} {value}" for key, value in found.items())
        print(f"{name:<34} {self.rows[-1]['seconds']:7.1f} s  {more}", flush=True)


def install(release: Release, report: Report) -> None:
    """helm install, to the first optimizer step."""
    begun_s = time.monotonic()
    with report.stage("helm install") as found:
        release.helm("install", "--timeout", minutes(5))
        found["objects"] = run("helm", "get", "manifest", release.name, "-n", release.namespace).stdout.count("\nkind:")
    with report.stage("to the first optimizer step") as found:
        release.until_step(1, deadline_s=600)
        found["since_install_s"] = round(time.monotonic() - begun_s, 1)
        found["limit_s"] = FIRST_STEP_LIMIT_S
    with report.stage("ten more steps"):
        release.until_step(11, deadline_s=300)


def kill_every_kind(release: Release, report: Report) -> None:
    """Delete the pods of each kind without grace; the run makes steps again and has lost nothing."""
    for component in KINDS:
        with report.stage(f"kill {component}") as found:
            before = release.status()
            killed = release.kill(component)
            found["pods"] = len(killed)

            def is_replaced(component: str = component, killed: list[str] = killed) -> bool:
                ready = release.ready_uids(component)
                return len(ready) >= len(killed) and ready.isdisjoint(killed)

            until(f"other pods of {component} are ready", is_replaced, deadline_s=RECOVERY_DEADLINE_S)
            lineage, step = before["run"]["lineage"], before["run"]["step"]

            def continues(lineage: int = lineage, step: int = step, component: str = component) -> bool:
                now = release.status()["run"]
                # a new trainer begins at its last checkpoint, so its steps count from there
                parent = int(now["parents"].get(str(now["lineage"]), "0-0").split("-")[1])
                is_other = component == "trainer" and now["lineage"] > lineage
                return now["step"] >= (parent if is_other else step) + STEPS_AFTER_A_KILL and (
                    component != "trainer" or is_other
                )

            until("steps continue", continues, deadline_s=RECOVERY_DEADLINE_S)
            after = release.status()
            lost = before["stats"]["rollouts_generated"] - after["stats"]["rollouts_generated"]
            if lost > 0:
                raise StageError(f"{lost} acknowledged rollouts are gone after {component} was killed")
            found |= {"lineage": after["run"]["lineage"], "step": after["run"]["step"]}


def scale(release: Release, report: Report) -> None:
    """1 -> 4 -> 1 searchers through the REST API; the run continues."""
    for number in (1, 4, 1):
        with report.stage(f"tba scale {number}") as found:
            release.tba("scale", str(number))

            def is_there(number: int = number) -> bool:
                ready = len(release.ready("searcher"))
                alive = sum(c["alive"] and c["kind"] == "searcher" for c in release.status()["run"]["components"])
                return ready == number and alive >= number

            until(f"{number} searchers are ready", is_there, deadline_s=RECOVERY_DEADLINE_S)
            found["step"] = release.step()
            release.until_step(found["step"] + STEPS_AFTER_A_KILL, deadline_s=RECOVERY_DEADLINE_S)
    with report.stage("tba scale recipe"):
        release.tba("scale", "recipe")


def change(release: Release, report: Report, *, values: Path, observe: Callable[[], bool]) -> None:
    """helm upgrade with a changed value, then helm rollback."""
    for name, verb in (("helm upgrade", "upgrade"), ("helm rollback", "rollback")):
        with report.stage(name) as found:
            if verb == "upgrade":
                release.helm("upgrade", "--timeout", minutes(5), "--values", str(values))
            else:
                run("helm", "rollback", release.name, "1", "-n", release.namespace, "--timeout", minutes(5))
            wanted = verb == "upgrade"
            until(f"the changed value is {'there' if wanted else 'gone'}", lambda w=wanted: observe() is w,
                  deadline_s=RECOVERY_DEADLINE_S)  # fmt: skip
            now = until("the buffer answers", release.status, deadline_s=RECOVERY_DEADLINE_S)["run"]
            found |= {"lineage": now["lineage"], "step": now["step"]}
            if now["state"] != "done":
                release.until_step(now["step"] + STEPS_AFTER_A_KILL, deadline_s=RECOVERY_DEADLINE_S)


def helm_test(release: Release, report: Report) -> None:
    """The chart's own tests."""
    with report.stage("helm test") as found:
        out = run("helm", "test", release.name, "-n", release.namespace, "--timeout", minutes(3)).stdout
        found["succeeded"] = out.count("Phase:          Succeeded")


def finish(release: Release, report: Report, *, deadline_s: float) -> None:
    """To the end of the run: its result, the ledger, free searchers, a completed Job."""
    with report.stage("to the end of the run") as found:
        until("the run is done", lambda: release.status()["run"]["state"] == "done", deadline_s=deadline_s, every_s=3)
        info = release.status()["run"]
        evals = [item for item in info["evals"] if item["state"] == "done"]
        found |= {"steps": info["step"], "lineages": info["lineage"]}
        found |= {"start": evals[0]["accuracy"], "final": evals[-1]["accuracy"]}
    with report.stage("tba ledger check") as found:
        found["says"] = json.dumps(release.tba("ledger", "check").strip().splitlines()[-1])
    with report.stage("searchers are let go"):
        until("no searcher is left", lambda: not release.pods("searcher"), deadline_s=120)
    with report.stage("the trainer's Job is complete"):

        def is_complete() -> bool:
            jobs = get(release.namespace, "jobs", "-l", "app.kubernetes.io/component=trainer")["items"]
            return any(c["type"] == "Complete" for job in jobs for c in job["status"].get("conditions", []))

        until("the Job is complete", is_complete, deadline_s=120)


def uninstall(release: Release, report: Report) -> None:
    """helm uninstall leaves the claims of Redis and the object store alone; without them nothing is left."""
    with report.stage("helm uninstall") as found:
        run("helm", "uninstall", release.name, "-n", release.namespace, "--wait", "--cascade", "foreground")
        claims = "persistentvolumeclaim/"
        until(
            "only claims are left",
            lambda: all(name.startswith(claims) for name in release.left_over()),
            deadline_s=120,
        )
        found["claims"] = len(release.left_over())
        # as NOTES says
        run("kubectl", "-n", release.namespace, "delete", "pvc", "-l", f"app.kubernetes.io/instance={release.name}")
        until("nothing is left", lambda: not release.left_over(), deadline_s=120)
        found["left"] = len(release.left_over())
