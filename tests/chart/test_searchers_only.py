"""Searchers alone, for the run of another release: their objects, settings and secrets, and their connections."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tba.config import load_recipe
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
    render,
    render_file,
)
from tests.support.installed_objects import cluster_with
from tests.support.kube_schemas import problems

pytestmark = needs_helm
QUICKSTART = CHART / "values-cpu-quickstart.yaml"


def test_nothing_is_installed_but_searchers() -> None:
    for kube in (OLDEST, NEWEST):
        made = render_file(SEARCHERS, kube=kube)
        assert Counter(x["kind"] for x in made.objects) == {
            "ConfigMap": 1, "Deployment": 1, "NetworkPolicy": 1, "PriorityClass": 1, "ServiceAccount": 1,
        }  # fmt: skip
        assert {x["metadata"]["name"] for x in made.objects} == {"t-recipe", "t-searcher", "searcher-1.lab.t"}
    assert [problem for x in made.objects if (problem := problems(x, "1.33"))] == []
    assert helm("lint", "--strict", str(CHART), *arguments(SEARCHERS)).returncode == 0


def test_they_work_for_the_run_that_the_values_name(tmp_path: Path) -> None:
    made = render_file(SEARCHERS)
    file = tmp_path / "recipe.toml"
    file.write_text(made.one("ConfigMap", "t-recipe")["data"]["recipe.toml"])
    for container in made.pod("searcher").containers:
        recipe = load_recipe(file, environ={x["name"]: x.get("value", "secret") for x in container["env"]})
        assert recipe.buffer_url == "http://run-buffer.far:8700"
        assert recipe.reward_url == "https://rewards.far"
        assert recipe.store.url == "s3://tba"


def test_they_know_a_searchers_token_and_keys_that_only_read() -> None:
    pod = render_file(SEARCHERS).pod("searcher")
    (tokens,) = [volume["secret"] for volume in pod.spec["volumes"] if "secret" in volume]
    assert tokens["secretName"] == "tba-tokens"
    assert tokens["items"] == [{"key": "searcher.json", "path": "tokens.json"}]
    named = [
        entry["valueFrom"]["secretKeyRef"]["name"] for c in pod.containers for entry in c["env"] if "valueFrom" in entry
    ]
    assert set(named) == {"tba-store-read"}


def test_they_stand_on_spot_nodes_and_end_within_the_notice() -> None:
    pod = render_file(SEARCHERS).pod("searcher")
    assert {toleration["effect"] for toleration in pod.spec["tolerations"]} == {"NoSchedule"}
    assert any("spot" in str(toleration) for toleration in pod.spec["tolerations"])
    assert pod.spec["terminationGracePeriodSeconds"] <= 30


def ports_of(rules: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """Port -> peers, without DNS."""
    return {port["port"]: rule["to"] for rule in rules for port in rule["ports"] if port["port"] not in {53, 5353}}


def test_they_reach_the_services_of_the_run_the_store_and_nothing_else() -> None:
    policy = render_file(SEARCHERS).one("NetworkPolicy", "t-searcher")["spec"]
    assert policy["ingress"] == []
    # the reward service and the store speak https; without keys for the store there is the agent of pod identities
    assert set(ports_of(policy["egress"])) == {8700, 443, 80}
    peers = "networkPolicy.run.to[0].ipBlock.cidr=10.9.0.0/16"
    narrow = render_file(SEARCHERS, "--set", peers).one("NetworkPolicy", "t-searcher")["spec"]
    assert ports_of(narrow["egress"])[8700] == [{"ipBlock": {"cidr": "10.9.0.0/16"}}]


def test_the_authorities_of_the_run_are_trusted() -> None:
    pod = render_file(SEARCHERS, "--set", "searchersOnly.caSecret=of-the-run").pod("searcher")
    assert {"name": "ca", "secret": {"secretName": "of-the-run", "defaultMode": 0o440,
            "items": [{"key": "ca.crt", "path": "ca.crt"}]}} in pod.spec["volumes"]  # fmt: skip
    assert all({"name": "TBA_TLS__CA_FILE", "value": "/etc/tba-ca/ca.crt"} in c["env"] for c in pod.containers)


def test_keda_may_scale_them_by_a_query_of_the_runs_prometheus() -> None:
    sets = "scaling.backend=keda,scaling.keda.serverAddress=http://p:9090,scaling.keda.query=tba_wait"
    made = render_file(SEARCHERS, "--set", sets)
    (trigger,) = made.of("ScaledObject")[0]["spec"]["triggers"]
    assert trigger["metadata"]["query"] == "tba_wait"
    assert "idleReplicaCount" not in made.of("ScaledObject")[0]["spec"], "the run's end is not known here"
    assert "replicas" not in made.one("Deployment", "t-searcher")["spec"]


def test_the_run_lets_them_in_where_its_values_say() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "spot"}}}
    sets = "networkPolicy.searchersFrom[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=spot"
    made = render("-f", str(QUICKSTART), "--set", sets)
    closed = render("-f", str(QUICKSTART))
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
