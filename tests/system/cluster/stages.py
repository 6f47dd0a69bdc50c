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
    rows: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a stage; what is put into the dictionary is shown."""
        begun_s, found = time.monotonic(), {}
        try:
            yield found
        except StageError as error:
            raise StageError(f"in stage {name!r}: {error}") from None
        self.rows.append({"stage": name, "seconds": round(time.monotonic() - begun_s, 1), **found})
        more = ", ".join(f"{key} {value}" for key, value in found.items())
        print(f"{name:<34} {self.rows[-1]['seconds']:7.1f} s  {more}", flush=True)


def install(release: Release, report: Report) -> None:
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
            found |= until_it_continues(release, before, is_restarted=component == "trainer")


def until_it_continues(release: Release, before: dict[str, Any], *, is_restarted: bool) -> dict[str, Any]:
    """Wait for some more steps than `before`. A trainer that was restarted makes them in a later lineage, after its
    last checkpoint. Nothing that had been counted before may be missing."""
    lineage, step = before["run"]["lineage"], before["run"]["step"]

    def continues() -> dict[str, Any] | None:
        now = release.status()["run"]
        begun = int(now["parents"].get(str(now["lineage"]), "0-0").split("-")[1]) if is_restarted else step
        is_the_one = now["lineage"] > lineage if is_restarted else now["lineage"] == lineage
        return now if is_the_one and now["step"] >= begun + STEPS_AFTER_A_KILL else None

    now = until("the run continues", continues, deadline_s=RECOVERY_DEADLINE_S)
    lost = before["stats"]["rollouts_generated"] - release.status()["stats"]["rollouts_generated"]
    if lost > 0:
        raise StageError(f"{lost} acknowledged rollouts are gone")
    return {"lineage": now["lineage"], "step": now["step"]}


def move_pods(release: Release, report: Report) -> None:
    place = ("-n", release.namespace)
    for component in ("searcher", "reward", "buffer", "trainer"):
        with report.stage(f"evict {component}") as found:
            before = release.status()
            for pod in release.pods(component):
                evict(release.namespace, pod["metadata"]["name"])
            found |= until_it_continues(release, before, is_restarted=component == "trainer")
    node = release.pods("trainer")[0]["spec"]["nodeName"]
    with report.stage("drain the trainer's node") as found:
        before = release.status()
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={minutes(4)}")
        try:
            run("kubectl", "drain", node, *flags, "--pod-selector", f"app.kubernetes.io/instance={release.name}")
        finally:
            run("kubectl", "uncordon", node)
        found |= until_it_continues(release, before, is_restarted=True)
    with report.stage("reinstall on kept claims") as found:
        before = release.status()
        run("helm", "uninstall", release.name, *place, "--wait", "--cascade", "foreground")
        release.helm("install", "--timeout", minutes(5))
        found |= until_it_continues(release, before, is_restarted=True)


def evict(namespace: str, pod: str) -> None:
    """Ask the API to evict a pod, as a drain or an autoscaler does; the PodDisruptionBudget is respected."""
    versions = run("kubectl", "api-versions").stdout.split()
    version = "policy/v1" if "policy/v1" in versions else "policy/v1beta1"
    body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    run("kubectl", "create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def scale(release: Release, report: Report) -> None:
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
            "only claims are left", lambda: all(name.startswith(claims) for name in release.left_over()), deadline_s=120
        )
        found["claims"] = len(release.left_over())
        # as NOTES says
        run("kubectl", "-n", release.namespace, "delete", "pvc", "-l", f"app.kubernetes.io/instance={release.name}")
        until("nothing is left", lambda: not release.left_over(), deadline_s=120)
        found["left"] = len(release.left_over())
