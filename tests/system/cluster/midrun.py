"""Changes of releases in the middle of a run, each of which ends in "the run continues"."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.system.cluster import own
from tests.system.cluster.kube import StageError, get, minutes, run, until
from tests.system.cluster.release import CHART, Release
from tests.system.cluster.stages import RECOVERY_DEADLINE_S, STEPS_AFTER_A_KILL, Report


def everything(namespace: str, sets: list[str], report: Report) -> None:
    """All of them, in two namespaces of their own."""
    with tempfile.TemporaryDirectory() as folder:
        alpha, beta = own.alpha(Path(folder), namespace, sets), own.beta(Path(folder), namespace, sets)
        try:
            side_by_side(alpha, beta, report)
            searchers_alone(own.more(Path(folder), f"{namespace}-more", alpha, sets), alpha, report)
            changed_recipes(Path(folder), beta, sets, report)
            moved_pods(alpha, beta, report)
            reinstall(alpha, report)
            uninstall(alpha, beta, report)
        except StageError as error:
            error = StageError(f"{error}\n\n{alpha.why()}\n\n{beta.why()}")
            with suppress(StageError):  # the first error says what is wrong
                own.delete_outside([namespace, f"{namespace}-more"])
            raise error from None
        own.delete_outside([namespace, f"{namespace}-more"])


def side_by_side(alpha: Release, beta: Release, report: Report) -> None:
    """Two releases in one namespace, one with a Redis and a store of its own, both to their tenth step."""
    with report.stage("two releases side by side") as found:
        alpha.make_namespace()
        beta.share_secrets_of(alpha)
        own.make_outside(alpha)
        for release in (alpha, beta):
            # as Flux with disableWaitForJobs: not until the end of the run
            release.helm("install", "--timeout", minutes(5), "--wait")
        for release in (alpha, beta):
            release.until_step(11, deadline_s=600)
            found[release.name] = f"run {release.status()['run']['run']}"


def searchers_alone(more: Release, alpha: Release, report: Report) -> None:
    """Searchers in another namespace generate for alpha's run while it has none of its own."""
    with report.stage("searchers alone, elsewhere") as found:
        own.make_place_for_searchers(more.namespace, alpha)
        more.helm("install", "--timeout", minutes(5))
        found["objects"] = ", ".join(sorted(kinds_of(more)))
        until("they are heard of", lambda: searchers_of(alpha, "more-"), deadline_s=RECOVERY_DEADLINE_S)
        alpha.tba("scale", "0")
        until("the run's own searchers are gone", lambda: not alpha.pods("searcher"), deadline_s=RECOVERY_DEADLINE_S)
        before = alpha.status()
        # more than was stored when the last of its own searchers went
        until_it_continues(alpha, before, is_restarted=False, steps=30)
        now = alpha.status()
        found["rollouts"] = now["stats"]["rollouts_generated"] - before["stats"]["rollouts_generated"]
        if found["rollouts"] <= 0:
            raise StageError("the run's searchers elsewhere have pushed nothing")
        alpha.tba("scale", "recipe")
        until("the run's own are back", lambda: alpha.ready("searcher"), deadline_s=RECOVERY_DEADLINE_S)
    with report.stage("and away again") as found:
        before = alpha.status()
        run("helm", "uninstall", more.name, "-n", more.namespace, "--wait", "--cascade", "foreground")
        until("nothing is left of them", lambda: not more.pods(), deadline_s=120)
        until_it_continues(alpha, before, is_restarted=False)


def changed_recipes(folder: Path, beta: Release, sets: list[str], report: Report) -> None:
    """Another recipe, then back to the first."""
    with restarted(beta, "helm upgrade, another recipe", report):
        own.beta(folder, beta.namespace, sets, file="changed", sync_interval="5").helm(
            "upgrade", "--timeout", minutes(5)
        )
    with restarted(beta, "helm rollback", report):
        # a rollback prunes by the last revision: first an upgrade to what is installed (docs)
        uids, revision, place = uids_of(beta), deployed(beta), ("-n", beta.namespace)
        installed = run("helm", "get", "values", beta.name, "--revision", revision, "-o", "yaml", *place).stdout
        run("helm", "upgrade", beta.name, str(CHART), "--values", "-", "--timeout", minutes(5), *place, stdin=installed)
        if uids_of(beta) != uids:
            raise StageError("pods were replaced, and nothing had changed")
        run("helm", "rollback", beta.name, "1", "--timeout", minutes(5), *place)
        until("the former trainer is pruned", lambda: len(jobs_of(beta, "trainer")) == 1, deadline_s=120)


def moved_pods(alpha: Release, beta: Release, report: Report) -> None:
    """An eviction of each kind of pod, then the drain of a node."""
    for component in ("searcher", "reward", "buffer", "trainer"):
        with report.stage(f"evict {component}") as found:
            before = beta.status()
            for pod in beta.pods(component):
                evict(beta.namespace, pod["metadata"]["name"])
            found |= until_it_continues(beta, before, is_restarted=component == "trainer")
    node = beta.pods("trainer")[0]["spec"]["nodeName"]
    with report.stage("drain the trainer's node") as found:
        before = {release: release.status() for release in (alpha, beta)}
        selector = "app.kubernetes.io/name=tba"
        try:
            run("kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
                f"--timeout={minutes(4)}", "--pod-selector", selector)  # fmt: skip
        finally:
            run("kubectl", "uncordon", node)
        for release, then in before.items():
            found[release.name] = until_it_continues(release, then, is_restarted=True)["step"]


def reinstall(alpha: Release, report: Report) -> None:
    """helm uninstall and helm install, on the claims that stay."""
    with restarted(alpha, "reinstall on kept claims", report):
        run("helm", "uninstall", alpha.name, "-n", alpha.namespace, "--wait", "--cascade", "foreground")
        alpha.helm("install", "--timeout", minutes(5))


def uninstall(alpha: Release, beta: Release, report: Report) -> None:
    """Nothing of either is left but the claims that alpha has."""
    with report.stage("helm uninstall") as found:
        for release in (alpha, beta):
            run("helm", "uninstall", release.name, "-n", release.namespace, "--wait", "--cascade", "foreground")
            until(f"no pod of {release.name} is left", lambda r=release: not r.pods(), deadline_s=120)
        claims = get(alpha.namespace, "pvc")["items"]
        found["claims"] = ", ".join(sorted(claim["metadata"]["name"] for claim in claims))


@contextmanager
def restarted(release: Release, name: str, report: Report) -> Iterator[None]:
    """A stage after which the run continues in a new lineage."""
    with report.stage(name) as found:
        before = release.status()
        yield
        found |= until_it_continues(release, before, is_restarted=True)


def until_it_continues(
    release: Release, before: dict[str, Any], *, is_restarted: bool, steps: int = STEPS_AFTER_A_KILL
) -> dict[str, Any]:
    """Wait for so many more steps than `before`; a trainer that was restarted makes them in a later lineage, after its
    last checkpoint. Nothing that had been counted before may be missing."""
    lineage, step = before["run"]["lineage"], before["run"]["step"]

    def continues() -> dict[str, Any] | None:
        now = release.status()["run"]
        begun = int(now["parents"].get(str(now["lineage"]), "0-0").split("-")[1]) if is_restarted else step
        is_the_one = now["lineage"] > lineage if is_restarted else now["lineage"] == lineage
        return now if is_the_one and now["step"] >= begun + steps else None

    now = until("the run continues", continues, deadline_s=RECOVERY_DEADLINE_S)
    lost = before["stats"]["rollouts_generated"] - release.status()["stats"]["rollouts_generated"]
    if lost > 0:
        raise StageError(f"{lost} acknowledged rollouts are gone")
    return {"lineage": now["lineage"], "step": now["step"]}


def evict(namespace: str, pod: str) -> None:
    """Ask the API to evict a pod, as a drain or an autoscaler does; the PodDisruptionBudget is respected."""
    versions = run("kubectl", "api-versions").stdout.split()
    version = "policy/v1" if "policy/v1" in versions else "policy/v1beta1"
    body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    run("kubectl", "create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def uids_of(release: Release) -> set[str]:
    """Return the uids of the pods that do the work."""
    parts: tuple[str, ...] = ("searcher", "reward", "buffer", "trainer", "redis", "objectstore")
    return {uid for part in parts for uid in release.ready_uids(part)}


def searchers_of(release: Release, prefix: str) -> list[str]:
    """Searchers of the release's run that are alive and whose pods' names begin so."""
    found = release.status()["run"]["components"]
    names = [item["component_id"] for item in found if item["kind"] == "searcher" and item["alive"]]
    return [name for name in names if name.startswith(prefix)]


def jobs_of(release: Release, component: str) -> list[str]:
    """Names of the Jobs of a component."""
    selector = f"app.kubernetes.io/instance={release.name},app.kubernetes.io/component={component}"
    return [job["metadata"]["name"] for job in get(release.namespace, "jobs", "-l", selector)["items"]]


def deployed(release: Release) -> str:
    """The revision that is installed; refused ones may follow it."""
    history = json.loads(run("helm", "history", release.name, "-n", release.namespace, "-o", "json").stdout)
    return next(str(item["revision"]) for item in reversed(history) if item["status"] == "deployed")


def kinds_of(release: Release) -> set[str]:
    """Kinds of what a release has installed."""
    lines = run("helm", "get", "manifest", release.name, "-n", release.namespace).stdout.splitlines()
    return {line.removeprefix("kind: ") for line in lines if line.startswith("kind: ")}
