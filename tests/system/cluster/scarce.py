"""One GPU too few: the trainer has its own all the same, also after an upgrade; an uninstallation loses no step."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.system.cluster import own
from tests.system.cluster.kube import ClusterError, minutes, run, until
from tests.system.cluster.midrun import until_it_continues
from tests.system.cluster.release import Release
from tests.system.cluster.stages import RECOVERY_DEADLINE_S, Report

GPU = "example.com/tba-test-gpu"
"""A resource that no device plug-in knows: a number in the status of a node."""


def everything(namespace: str, sets: list[str], report: Report) -> None:
    """All of it, in a namespace of its own, on a node that has two GPUs for a trainer and two searchers."""
    with tempfile.TemporaryDirectory() as folder, gpus(2):
        release = scarce(Path(folder), namespace, sets)
        try:
            too_few(release, report)
            upgrade(release, report)
            reinstall(release, report)
        except ClusterError as error:
            error = ClusterError(f"{error}\n\n{release.why()}")
            with suppress(ClusterError):  # the first error says what is wrong
                own.delete_outside([namespace])
            raise error from None
        run("helm", "uninstall", release.name, "-n", namespace, "--timeout", minutes(4))
        own.delete_outside([namespace])


def scarce(folder: Path, namespace: str, sets: list[str]) -> Release:
    """A release whose trainer writes no checkpoint but when it ends, and whose pods want GPUs."""
    values: dict[str, Any] = own.small() | {
        # no step is saved but by the end of a trainer
        "recipe": own.recipe("scarce", 3, checkpoint_interval="100000"),
        "objectstore": {"enabled": True, "persistence": {"size": "2Gi"}},
        "store": {"credentialsSecret": "tba-store", "readOnlyCredentialsSecret": "tba-store-read"},
        "redis": {"auth": {"existingSecret": "tba-redis"}, "persistence": {"size": "2Gi"}, "maxmemory": "256mb"},
        "buffer": {"resources": own.SMALL, "extraEnv": [{"name": "TBA_BUFFER__MAX_BYTES", "value": "134217728"}]},
        "scaling": {"backend": "none"},
    }
    for part in ("searcher", "trainer"):
        values[part] |= {"gpu": {"count": 1, "resource": GPU}}
    values["searcher"] |= {"replicas": 2}
    return Release("scarce", namespace, [own.values_file(folder, "scarce", values)], sets)


@contextmanager
def gpus(number: int) -> Iterator[None]:
    """One node has so many GPUs meanwhile."""
    nodes = json.loads(run("kubectl", "get", "nodes", "-o", "json").stdout)["items"]
    path = f"/status/capacity/{GPU.replace('/', '~1')}"
    command = ("kubectl", "patch", "node", nodes[0]["metadata"]["name"], "--subresource=status", "--type=json", "-p")
    run(*command, json.dumps([{"op": "add", "path": path, "value": str(number)}]))
    try:
        yield
    finally:
        run(*command, json.dumps([{"op": "remove", "path": path}]), check=False)


def too_few(release: Release, report: Report) -> None:
    """Searchers are there first, and the trainer takes the GPU of one of them."""
    with report.stage("one GPU too few") as found:
        release.make_namespace()
        release.helm("install", "--timeout", minutes(5))
        release.until_step(5, deadline_s=600)
        found |= until_one_searcher_is_left(release)


def upgrade(release: Release, report: Report) -> None:
    """Another trainer gets a GPU at once, though a searcher has waited for one since long before."""
    with report.stage("... and an upgrade of the trainer") as found:
        before = release.status()
        release.helm("upgrade", "--timeout", minutes(5), "--set", "trainer.resources.requests.cpu=60m")
        found |= until_it_continues(release, before, is_restarted=True)
        found |= until_one_searcher_is_left(release)


def until_one_searcher_is_left(release: Release) -> dict[str, Any]:
    """Wait until trainer and one searcher run, and the other searcher waits for a GPU."""

    def is_so() -> bool:
        pods = release.pods("searcher")
        waiting = [pod for pod in pods if pod["status"]["phase"] == "Pending" and "nodeName" not in pod["spec"]]
        return len(release.ready("trainer")) == len(release.ready("searcher")) == len(waiting) == 1

    until("trainer and one searcher have a GPU", is_so, deadline_s=RECOVERY_DEADLINE_S)
    return {"step": release.step()}


def reinstall(release: Release, report: Report) -> None:
    """`helm uninstall` ends the trainer before its buffer and store: the run continues where it was."""
    with report.stage("helm uninstall loses no step") as found:
        before, begun_s = release.status()["run"], time.monotonic()
        run("helm", "uninstall", release.name, "-n", release.namespace, "--timeout", minutes(4), "--wait", "--cascade",
            "foreground")  # fmt: skip
        found["uninstall_s"] = round(time.monotonic() - begun_s, 1)
        until("no pod is left", lambda: not release.pods(), deadline_s=120)
        release.helm("install", "--timeout", minutes(5))

        def parent() -> str | None:
            now = release.status()["run"]
            return now["parents"].get(str(now["lineage"])) if now["lineage"] > before["lineage"] else None

        found["was"] = f"{before['lineage']}-{before['step']}"
        found["continues_from"] = until("the trainer is back", parent, deadline_s=RECOVERY_DEADLINE_S)
        lineage, step = map(int, found["continues_from"].split("-"))
        if lineage != before["lineage"] or step < before["step"]:
            raise ClusterError(f"the run was at {found['was']} and continues from {found['continues_from']}")
        release.until_step(step + 1, deadline_s=RECOVERY_DEADLINE_S)
