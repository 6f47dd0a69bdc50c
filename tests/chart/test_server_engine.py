"""`searcher.openai`: searchers that sample in a vLLM server, one for all or one in each pod."""

from __future__ import annotations

from pathlib import Path

from tba.config import Recipe, load_recipe
from tests.chart.test_access import peers, policies
from tests.support.chart import Rendering, environment, needs_helm, quickstart
from tests.support.kube_schemas import problems

pytestmark = needs_helm
CLAIM = "searcher.openai.weights.volume.persistentVolumeClaim.claimName=weights"
ONE = f"searcher.replicas=1,searcher.openai.url=http://vllm.lab:8000,{CLAIM}"
TOKEN = "searcher.openai.token.existingSecret=server"
BESIDE = "searcher.openai.url=http://localhost:8000,searcher.openai.weights.volume.emptyDir.sizeLimit=9Gi"


def read(made: Rendering, component: str, folder: Path) -> Recipe:
    """The recipe as a component reads it."""
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
