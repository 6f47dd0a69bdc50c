"""An upgrade restarts the right pods, and is compared with the cluster before it changes anything."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import (
    CHART,
    KUBERNETES_API,
    NAMESPACE,
    NODES,
    QUICKSTART,
    REGISTRY,
    Rendering,
    helm,
    needs_helm,
    render_file,
    template,
)
from tests.support.installed_objects import ENDPOINTS, SERVICE, cluster_with

pytestmark = needs_helm
RESTARTED = ("Deployment", "StatefulSet")


def templates(made: Rendering) -> dict[str, Any]:
    """Name -> pod template of everything that a difference restarts, with the names of the Jobs."""
    found = {f"{pod.kind}/{pod.name}": (pod.metadata, pod.spec) for pod in made.pods() if pod.kind in RESTARTED}
    return found | {f"Job/{x['metadata']['name']}": None for x in made.of("Job")}


def test_a_newer_chart_that_changes_nothing_restarts_nothing(tmp_path: Path) -> None:
    copy = tmp_path / "tba"
    shutil.copytree(CHART, copy)
    chart = copy / "Chart.yaml"
    chart.write_text(re.sub(r"(?m)^version: .*$", "version: 9.9.9", chart.read_text()))
    done = template("-f", str(QUICKSTART), chart=copy)
    assert done.returncode == 0, done.stderr
    newer = Rendering([x for x in yaml.safe_load_all(done.stdout) if x])
    older = render_file(QUICKSTART)
    assert templates(newer) == templates(older)


def test_another_recipe_restarts_what_reads_it_and_nothing_else(tmp_path: Path) -> None:
    old, new = (templates(render_file(QUICKSTART, "--set", f"recipeName={name}")) for name in ("quickstart", "gsm8k"))
    changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    assert changed == {"Deployment/t-buffer", "Deployment/t-reward", "Deployment/t-searcher"}
    assert {name.rsplit("-", 1)[0] for name in old.keys() ^ new.keys()} == {"Job/t-trainer", "Job/t-setup"}


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ("searcher.replicas=3", {"Deployment/t-buffer"}),  # the buffer gets the number that applies until one is set
        ("trainer.backoffLimit=7", set()),
        ("trainer.resources.requests.cpu=2", {"Job/t-trainer"}),
        ("searcher.resources.requests.cpu=2", {"Deployment/t-searcher"}),
        ("reward.replicas=2", set()),
        ("networkPolicy.enabled=false", set()),
        ("serviceMonitor.enabled=true", set()),
    ],
)
def test_a_change_restarts_only_what_it_is_about(change: str, restarted: set[str]) -> None:
    old, new = templates(render_file(QUICKSTART)), templates(render_file(QUICKSTART, "--set", change))
    changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    changed |= {name.rsplit("-", 1)[0] for name in old.keys() ^ new.keys()}
    assert changed == restarted


def test_what_cannot_be_changed_later_stays_the_same() -> None:
    """Selectors of workloads, and the claims of StatefulSets, are fixed when they are made."""
    changes = "image.tag=v2,commonLabels.a=b,pod.labels.c=d,redis.resources.limits.memory=2Gi,searcher.replicas=4"
    old, new = render_file(QUICKSTART), render_file(QUICKSTART, "--set", changes)
    for kind in ("Deployment", "StatefulSet"):
        for before, after in zip(old.of(kind), new.of(kind), strict=True):
            assert before["spec"]["selector"] == after["spec"]["selector"]
            assert before["spec"].get("serviceName") == after["spec"].get("serviceName")
            assert before["spec"].get("volumeClaimTemplates") == after["spec"].get("volumeClaimTemplates")


@pytest.mark.parametrize("path", [QUICKSTART, NODES], ids=lambda path: path.stem)
def test_the_longest_name_of_a_release_fits(path: Path) -> None:
    release = "r" * 53
    done = template("-f", str(path), release=release)
    assert done.returncode == 0, done.stderr
    for found in yaml.safe_load_all(done.stdout):
        if not found:
            continue
        name = found["metadata"]["name"]
        assert len(name) <= (52 if found["kind"] == "StatefulSet" else 63), name
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name.replace(".", "-")), name
        assert "." not in name or found["kind"] == "PriorityClass"
        assert all(len(str(value)) <= 63 for value in found["metadata"]["labels"].values())


def test_a_cluster_that_learns_of_failure_policies_gets_another_job() -> None:
    """Kubernetes refuses to add podFailurePolicy to a Job: the same name would make every upgrade fail."""
    old, new = (render_file(QUICKSTART, kube=kube).one("Job", "t-trainer") for kube in ("1.25.0", "1.26.0"))
    assert "podFailurePolicy" not in old["spec"]
    assert [rule["action"] for rule in new["spec"]["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore", "FailJob"]
    assert old["metadata"]["name"] != new["metadata"]["name"]


def test_a_tool_that_prunes_nothing_replaces_the_job_of_one_name() -> None:
    fixed = ("--set", "trainer.fixedJobName=true")
    old, new = (
        render_file(QUICKSTART, *fixed, "--set", f"trainer.resources.requests.cpu={cpu}").one("Job", "t-trainer")
        for cpu in (1, 2)
    )
    assert old["metadata"]["name"] == new["metadata"]["name"] == "t-trainer"
    assert old["spec"] != new["spec"]
    assert new["metadata"]["annotations"] == {"argocd.argoproj.io/sync-options": "Force=true,Replace=true"}
    assert "annotations" not in render_file(QUICKSTART).one("Job", "t-trainer")["metadata"]
    made = render_file(QUICKSTART, *fixed)
    (rights,) = (role["rules"] for role in made.of("Role") if role["metadata"]["name"] == "t-stop")
    assert rights[0]["resourceNames"] == ["t-trainer"]


@pytest.fixture(scope="module")
def installed() -> list[dict[str, Any]]:
    """The objects that an installation of the quickstart has left, with quantities as an API server writes them."""
    made = copy.deepcopy(render_file(QUICKSTART).objects)
    return [x for x in made if x["kind"] in ("StatefulSet", "ConfigMap")]


def asked(folder: Path, objects: list[dict[str, Any]], *args: str, upgrade: bool = True) -> tuple[str, Rendering]:
    """(what Helm says, what it renders) of the quickstart where these objects are."""
    how = ["--is-upgrade"] if upgrade else []
    with cluster_with(objects, folder) as kubeconfig:
        done = helm("template", "t", str(CHART), "-n", NAMESPACE, "-f", str(QUICKSTART), "--dry-run=server", *REGISTRY,
                    "--disable-openapi-validation", "--kubeconfig", str(kubeconfig), *how, *args)  # fmt: skip
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return " ".join(done.stderr.split()), Rendering([x for x in yaml.safe_load_all(done.stdout) if x])


def test_an_upgrade_that_changes_nothing_is_taken(installed: list[dict[str, Any]], tmp_path: Path) -> None:
    said, made = asked(tmp_path, installed, *KUBERNETES_API)
    assert said == ""
    assert made.one("StatefulSet", "t-redis")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "redis.persistence.size=2Gi",
            "redis.persistence.size is 2Gi and the claim was made with 1Gi, which Kubernetes does not let Helm change; "
            "set it back and grow the claim itself: kubectl patch pvc data-t-redis-0",
        ),
        ("objectstore.persistence.storageClass=fast", 'objectstore.persistence.storageClass is "fast" and the claim'),
        (
            "redis.enabled=false,redis.external.url=redis://mine:6379",
            "redis.enabled is false, and the run of this release lives on the claim of t-redis; set it back",
        ),
        (
            "objectstore.enabled=false",
            "objectstore.enabled is false, and the run of this release lives on the claim of",
        ),
        (
            "fullnameOverride=other",
            "this release's objects and claims are called t, and the values would call them other, which would",
        ),
    ],
)
def test_what_could_not_be_changed_is_refused_in_a_sentence(change, sentence, installed, tmp_path):
    said, _ = asked(tmp_path, installed, *KUBERNETES_API, "--set", change)
    assert sentence in said


def test_the_buffer_reaches_the_api_server_that_the_cluster_names_and_no_other_address(tmp_path: Path) -> None:
    said, made = asked(tmp_path, [SERVICE, ENDPOINTS], upgrade=False)
    assert said == ""
    egress = made.one("NetworkPolicy", "t-buffer")["spec"]["egress"]
    found = {
        (peer["ipBlock"]["cidr"], port["port"])
        for rule in egress
        for peer in rule["to"]
        for port in rule["ports"]
        if "ipBlock" in peer and port["port"] not in {53, 5353}
    }
    behind = {("192.0.2.10/32", 6443), ("192.0.2.11/32", 6443)}
    assert found == {("10.96.0.1/32", 443), ("fd00::1/128", 443), *behind}


def test_where_the_cluster_does_not_say_the_values_must(tmp_path: Path) -> None:
    said, _ = asked(tmp_path, [SERVICE], upgrade=False)
    assert "no cluster was asked where that is; name it in networkPolicy.kubernetesApi.to" in said
    said, _ = asked(tmp_path, [], "--set", "networkPolicy.enabled=false", upgrade=False)
    assert said == ""
