"""Rendered manifests: golden, valid by the schemas of several releases, and as linters like them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.support.chart import (
    CHART,
    KUBERNETES_API,
    NAMESPACE,
    NEWEST,
    OLDEST,
    REGISTRY,
    SCENARIOS,
    SEARCHERS,
    Rendering,
    arguments,
    helm,
    needs_helm,
    render_file,
    value_files,
)
from tests.support.chart_golden import CASES, FOLDER, made
from tests.support.kube_schemas import FOREIGN, NEW_FIELDS, OLD_KINDS, VERSIONS, fields_in, problems

# ---- Manifests of every values file are complete, and valid on old and new clusters ---------------------------------


pytestmark = needs_helm
FILES = value_files()
ONLY_NEW = {"nodes.yaml"}
"""Indexed Jobs came with 1.22."""


def name(path: Path) -> str:
    """Return the name of a test."""
    return path.stem


def test_there_are_values_for_each_promised_deployment() -> None:
    promised = {"values-cpu-quickstart.yaml", "values-gsm8k-4gpu.yaml", "values-math-7b-8gpu.yaml"}
    assert promised <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_it_lints(path: Path) -> None:
    done = helm("lint", "--strict", str(CHART), *arguments(path), *KUBERNETES_API, *REGISTRY, "--kube-version", NEWEST)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=name)
def test_it_is_valid_by_the_strict_schemas_of_several_releases(path: Path) -> None:
    found = {}
    for version in VERSIONS:
        objects = render_file(path, kube=f"{version}.0").objects
        assert len(objects) > 10
        bad = [problem for x in objects if x["kind"] not in FOREIGN and (problem := problems(x, version))]
        if bad:
            found[version] = bad
    assert found == {}


@pytest.mark.parametrize("path", [path for path in FILES if path.name not in ONLY_NEW], ids=name)
def test_it_uses_nothing_that_a_cluster_of_1_20_lacks(path: Path) -> None:
    objects = render_file(path, kube=OLDEST).objects
    used = {(x["apiVersion"], x["kind"]) for x in objects if x["kind"] not in FOREIGN}
    assert used <= OLD_KINDS
    assert {f for x in objects if x["kind"] not in FOREIGN for f in fields_in(x)} & NEW_FIELDS == set()
    # the schemas of 1.25 are as strict about the fields that both versions have
    same = [x for x in objects if x["kind"] not in {*FOREIGN, "PodDisruptionBudget"}]
    assert [problem for x in same if (problem := problems(x, "1.25"))] == []


def test_the_schemas_find_a_wrong_field() -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": [{"name": "a", "foo": 1}]},
    }
    assert "foo" in (problems(pod, "1.33") or "")


@pytest.mark.parametrize("path", FILES, ids=name)
def test_names_are_unique_and_labels_say_whose_an_object_is(path: Path) -> None:
    objects = render_file(path).objects
    named = [(x["kind"], x["metadata"]["name"]) for x in objects]
    assert len(named) == len(set(named))
    for found in objects:
        if found["metadata"]["name"] == "t-more":  # extraObjects are as the user wrote them
            continue
        labels = found["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "tba"
        assert labels["app.kubernetes.io/instance"] == "t"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        if found["kind"] == "PriorityClass":  # of the whole cluster
            assert NAMESPACE in found["metadata"]["name"].split(".")
            continue
        assert found["metadata"]["namespace"] == NAMESPACE, "what applies it without Helm would take the default one"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_selectors_find_the_pods_that_they_are_meant_for(path: Path) -> None:
    made = render_file(path)
    pods = list(made.pods())
    for found in made.objects:
        wanted = found.get("spec", {}).get("selector")
        if found["kind"] in FOREIGN or wanted is None:
            continue
        labels = wanted.get("matchLabels", wanted)
        chosen = {pod.component for pod in pods if labels.items() <= pod.metadata["labels"].items()}
        assert chosen == {found["metadata"]["labels"]["app.kubernetes.io/component"]}, found["metadata"]["name"]


TWO_APIS = [f"--set={run}.{value}" for run in ("tba", "second") for value in (KUBERNETES_API[1], REGISTRY[1])]


def test_a_chart_of_several_turns_runs_on_and_off_and_tells_them_apart(tmp_path: Path) -> None:
    runs = ("tba", "second", "third")
    dependencies = [
        {"name": "tba", "version": "*", "condition": f"{run}.enabled", **({} if run == "tba" else {"alias": run})}
        for run in runs
    ]
    document = {"apiVersion": "v2", "name": "lab", "version": "0.1.0", "dependencies": dependencies}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(document))
    shutil.copytree(CHART, tmp_path / "charts" / "tba")
    values = yaml.safe_load((CHART / "values-cpu-quickstart.yaml").read_text())
    own = {"second": {"nameOverride": "b", "serviceMonitor": {"enabled": True}}, "third": {"enabled": False}}
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({run: values | own.get(run, {}) for run in runs}))
    done = helm("template", "t", str(tmp_path), "-f", str(path), "--namespace", NAMESPACE, *TWO_APIS)
    assert done.returncode == 0, done.stderr
    made = Rendering([found for found in yaml.safe_load_all(done.stdout) if found])
    named = [(found["kind"], found["metadata"]["name"]) for found in made.objects]
    assert len(named) == len(set(named))
    assert {name for kind, name in named if kind == "Service"} >= {"t-buffer", "t-b-buffer"}
    pods = list(made.pods())
    for service in made.of("Service"):
        wanted = service["spec"]["selector"].items()
        found = [pod.name for pod in pods if wanted <= pod.metadata["labels"].items()]
        assert found == [service["metadata"]["name"]]
    (monitor,) = made.of("ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] == "b"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_port_names_its_protocol_and_every_service_finds_its_port(path: Path) -> None:
    made = render_file(path)
    for service in made.of("Service"):
        pod = made.pod(service["metadata"]["labels"]["app.kubernetes.io/component"])
        ports = {port["name"]: port["containerPort"] for c in pod.containers for port in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert port["protocol"] == "TCP"
            assert port["targetPort"] in ports, service["metadata"]["name"]
    for pod in made.pods():
        assert all(port["protocol"] == "TCP" for c in pod.containers for port in c.get("ports", []))


def test_labels_of_the_user_are_on_everything() -> None:
    made_by = next(path for path in FILES if path.name == "external.yaml")
    made = render_file(made_by)
    assert {x["metadata"].get("labels", {}).get("team") for x in made.objects if x["metadata"]["name"] != "t-more"} == {
        "rl"
    }
    assert {pod.metadata["labels"]["team"] for pod in made.pods()} == {"rl"}
    rival = render_file(made_by, "--set", "commonLabels.app\\.kubernetes\\.io/name=mine")
    assert {pod.metadata["labels"]["app.kubernetes.io/name"] for pod in rival.pods()} == {"tba"}


def test_what_the_chart_brings_along_is_what_lies_in_the_repository() -> None:
    for file in (CHART / "files" / "recipes").glob("*.toml"):
        assert file.read_text() == (CHART.parents[1] / "recipes" / file.name).read_text(), (
            f"copy recipes/{file.name} again"
        )
    assert len(list((CHART / "files" / "recipes").iterdir())) >= 3
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    from tba import __version__

    assert chart["appVersion"] == __version__
    assert (
        helm(
            "template", "t", str(CHART), "-f", str(CHART / "values-cpu-quickstart.yaml"), *KUBERNETES_API, *REGISTRY
        ).returncode
        == 0
    )


# ---- The chart makes what is kept in golden/: a change of a template is seen, and looked at, before it is merged ----


@pytest.mark.parametrize("name", CASES)
def test_the_chart_makes_what_is_kept(name: str) -> None:
    kept = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert made(name).splitlines() == kept, "look at the difference; if it is meant, run `make golden`"


def test_no_golden_output_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CASES)


# ---- Rules of checkov and kube-linter that the chart follows --------------------------------------------------------


LINTED = [*value_files(), SEARCHERS]
PINNED = ("image", "buffer.image", "reward.image", "searcher.image", "trainer.image", "redis.image")
DIGESTS = [f"{part}.tag=1.2@sha256:{number:064x}" for number, part in enumerate(PINNED)]


@pytest.mark.parametrize("path", LINTED, ids=lambda path: path.stem)
def test_replicas_stand_on_different_nodes_where_they_can(path: Path) -> None:
    made = render_file(path)
    for found in made.of("Deployment"):
        if found["spec"].get("replicas", 1) > 1 and found["metadata"]["name"] != "t-searcher":
            spec = found["spec"]["template"]["spec"]
            (term,) = spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
            assert term["podAffinityTerm"]["labelSelector"] == found["spec"]["selector"]


@pytest.mark.parametrize("path", LINTED, ids=lambda path: path.stem)
def test_no_secret_is_a_plain_value_of_an_environment(path: Path) -> None:
    for pod in render_file(path).pods():
        for container in pod.containers:
            for entry in container.get("env", []):
                is_secret = re.search("secret|password", entry["name"], re.I) and not entry["name"].endswith("_FILE")
                assert "valueFrom" in entry or not is_secret, entry["name"]


def test_a_pod_that_is_not_ready_holds_up_no_drain() -> None:
    quickstart = next(path for path in LINTED if path.stem == "values-cpu-quickstart")
    for budget in render_file(quickstart).of("PodDisruptionBudget"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    old = render_file(quickstart, kube=OLDEST).of("PodDisruptionBudget")
    assert not any("unhealthyPodEvictionPolicy" in budget["spec"] for budget in old)


@pytest.mark.parametrize("path", [*LINTED, SCENARIOS / "bare.yaml"], ids=lambda path: path.stem)
def test_images_registries_and_pull_secrets_are_set_in_one_place(path: Path) -> None:
    """One file of values pins every image by its digest, wherever it comes from."""
    once = ["global.imageRegistry=registry.company:5000/tba", "global.imagePullSecrets={pull-a,pull-b}", *DIGESTS]
    made = render_file(path, "--set", ",".join(once))
    for pod in made.pods():
        assert pod.spec["imagePullSecrets"] == [{"name": "pull-a"}, {"name": "pull-b"}], pod.name
        for container in pod.containers:
            image = container["image"]
            assert re.fullmatch(r"registry\.company:5000/tba/[a-z-]+:1\.2@sha256:[0-9a-f]{64}", image), image
