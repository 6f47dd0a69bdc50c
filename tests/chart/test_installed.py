"""The chart compares an upgrade with the cluster before it changes anything: fields that Kubernetes never changes, and
the place of a run's data. It also asks the cluster for the address of its API."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import (
    CHART,
    KUBERNETES_API,
    NAMESPACE,
    QUICKSTART,
    REGISTRY,
    Rendering,
    helm,
    needs_helm,
    render_file,
)
from tests.support.installed_objects import ENDPOINTS, SERVICE, cluster_with

pytestmark = needs_helm


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
def test_what_could_not_be_changed_is_refused_in_a_sentence(
    change: str, sentence: str, installed: list[dict[str, Any]], tmp_path: Path
) -> None:
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
