"""Searchers alone for the run of another release, and searchers that sample in a vLLM server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tba.config import Recipe, load_recipe
from tests.chart.test_access import peers, policies
from tests.support.chart import (
    CHART,
    NAMESPACE,
    NEWEST,
    OLDEST,
    REGISTRY,
    SEARCHERS,
    Rendering,
    arguments,
    environment,
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


CLAIM = "searcher.openai.weights.volume.persistentVolumeClaim.claimName=weights"
ONE = f"searcher.replicas=1,searcher.openai.url=http://vllm.lab:8000,{CLAIM}"
TOKEN = "searcher.openai.token.existingSecret=server"
BESIDE = "searcher.openai.url=http://localhost:8000,searcher.openai.weights.volume.emptyDir.sizeLimit=9Gi"


def read(made: Rendering, component: str, folder: Path) -> Recipe:
    (folder / "recipe.toml").write_text(made.one("ConfigMap", "t-recipe")["data"]["recipe.toml"])
    return load_recipe(folder / "recipe.toml", environ=environment(made.pod(component)))


def test_a_searcher_samples_in_the_server_and_every_component_knows_it(tmp_path: Path) -> None:
    made = quickstart(ONE, TOKEN, "searcher.openai.weights.pathAtServer=/mnt/tba")
    for component in ("buffer", "searcher", "trainer", "setup"):
        recipe = read(made, component, tmp_path)
        assert (recipe.searcher.engine, recipe.searcher.openai.url) == ("openai", "http://vllm.lab:8000")
    openai = read(made, "searcher", tmp_path).searcher.openai
    assert (openai.weights_folder, openai.weights_folder_at_server) == ("/openai-weights", "/mnt/tba")
    spec = made.pod("searcher").spec
    (container,) = spec["containers"]
    assert {"name": "openai-weights", "persistentVolumeClaim": {"claimName": "weights"}} in spec["volumes"]
    assert {"name": "openai-weights", "mountPath": "/openai-weights"} in container["volumeMounts"]
    (token,) = [entry for entry in container["env"] if entry["name"] == openai.token_env]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "server", "key": "token"}
    others = [container for pod in made.pods() if pod.component != "searcher" for container in pod.containers]
    assert openai.token_env not in {entry["name"] for other in others for entry in other.get("env", [])}
    deployment = made.one("Deployment", "t-searcher")
    assert problems(deployment, "1.33") is None
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}, "two would load weights into one server"


def test_the_buffer_starts_no_second_searcher_for_one_server(tmp_path: Path) -> None:
    assert read(quickstart(ONE), "buffer", tmp_path).shared_server == "http://vllm.lab:8000"
    made = quickstart(BESIDE, "searcher.replicas=3")
    recipe = read(made, "buffer", tmp_path)
    assert (recipe.shared_server, recipe.scaling.num_searchers) == (None, 3)
    strategy = made.one("Deployment", "t-searcher")["spec"]["strategy"]
    assert strategy["rollingUpdate"]["maxSurge"] == 0, "a new pod would wait for the GPU of an old one"


def test_searchers_and_nobody_else_reach_the_server() -> None:
    found = policies(quickstart(ONE, "networkPolicy.openai.to[0].podSelector.matchLabels.app=vllm"))
    rules = [(name, rule) for name, spec in found.items() for rule in spec["egress"] or []]
    reaches = {name for name, rule in rules if rule["ports"][0]["port"] == 8000}
    assert reaches == {"searcher"}
    service = policies(quickstart(ONE, "searcher.openai.url=http://vllm.lab", "networkPolicy.openai.ports={80,8000}"))
    assert {("namespaces", 80), ("namespaces", 8000)} <= peers(service["searcher"]["egress"], "to")
    anywhere = {("0.0.0.0/0", 8000), ("::/0", 8000), ("namespaces", 8000)}
    assert anywhere <= peers(policies(quickstart(ONE))["searcher"]["egress"], "to")
    assert not anywhere & peers(policies(quickstart(BESIDE))["searcher"]["egress"], "to")
