"""Searchers alone, for the run of another release: their objects, settings and secrets, and their connections."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.chart import (
    CHART,
    NAMESPACE,
    NEWEST,
    OLDEST,
    REGISTRY,
    SEARCHERS,
    arguments,
    helm,
    needs_helm,
    quickstart,
    render_file,
)
from tests.support.installed_objects import cluster_with
from tests.support.kube_schemas import problems

pytestmark = needs_helm


def test_nothing_is_installed_but_searchers() -> None:
    for kube in (OLDEST, NEWEST):
        made = render_file(SEARCHERS, kube=kube)
        assert Counter(x["kind"] for x in made.objects) == {
            "ConfigMap": 1, "Deployment": 1, "NetworkPolicy": 1, "PriorityClass": 1, "ServiceAccount": 1,
        }  # fmt: skip
        assert {x["metadata"]["name"] for x in made.objects} == {"t-recipe", "t-searcher", "searcher-1.lab.t"}
    assert [problem for x in made.objects if (problem := problems(x, "1.33"))] == []
    assert helm("lint", "--strict", str(CHART), *arguments(SEARCHERS)).returncode == 0


def ports_of(rules: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """Port -> peers, without DNS."""
    return {port["port"]: rule["to"] for rule in rules for port in rule["ports"] if port["port"] not in {53, 5353}}


def test_the_peers_of_the_run_can_be_named() -> None:
    peers = "networkPolicy.run.to[0].ipBlock.cidr=10.9.0.0/16"
    narrow = render_file(SEARCHERS, "--set", peers).one("NetworkPolicy", "t-searcher")["spec"]
    assert ports_of(narrow["egress"])[8700] == [{"ipBlock": {"cidr": "10.9.0.0/16"}}]


def test_the_run_lets_them_in_where_its_values_say() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "spot"}}}
    sets = "networkPolicy.searchersFrom[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=spot"
    made = quickstart(sets)
    closed = quickstart()
    for component in ("buffer", "reward", "objectstore"):
        (rule,) = made.one("NetworkPolicy", f"t-{component}")["spec"]["ingress"]
        assert peer in rule["from"], component
        (rule,) = closed.one("NetworkPolicy", f"t-{component}")["spec"]["ingress"]
        assert peer not in rule["from"], component


def test_the_notes_speak_of_searchers_and_of_nothing_that_is_not_there(tmp_path: Path) -> None:
    with cluster_with([], tmp_path) as kubeconfig:
        words = (*arguments(SEARCHERS), *REGISTRY, "--dry-run=client", "--kubeconfig", str(kubeconfig))
        done = helm("install", "t", str(CHART), "-n", NAMESPACE, *words)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "2 searchers in lab, for the run at http://run-buffer.far:8700" in notes
    assert "t-buffer" not in notes
    assert "WARNING" not in notes
