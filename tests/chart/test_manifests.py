"""Rendered manifests: golden, valid by the schemas of several releases, and as linters like them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.chart import (
    CHART,
    FILES,
    KUBERNETES_API,
    NAMESPACE,
    NEWEST,
    NODES,
    OLDEST,
    REGISTRY,
    SCENARIOS,
    SEARCHERS,
    arguments,
    each_file,
    helm,
    needs_helm,
    render_file,
)
from tests.support.chart_golden import CASES, FOLDER, made
from tests.support.kube_schemas import FOREIGN, NEW_FIELDS, OLD_KINDS, VERSIONS, fields_in, problems

# ---- Manifests of every values file are complete, and valid on old and new clusters ---------------------------------


pytestmark = needs_helm


@each_file()
def test_it_lints(path: Path) -> None:
    done = helm("lint", "--strict", str(CHART), *arguments(path), *KUBERNETES_API, *REGISTRY, "--kube-version", NEWEST)
    assert done.returncode == 0, done.stdout + done.stderr


@each_file()
def test_it_is_valid_by_the_strict_schemas_of_several_releases(path: Path) -> None:
    found = {}
    for version in VERSIONS:
        objects = render_file(path, kube=f"{version}.0").objects
        assert len(objects) > 10
        bad = [problem for x in objects if x["kind"] not in FOREIGN and (problem := problems(x, version))]
        if bad:
            found[version] = bad
    assert found == {}


@each_file(NODES)  # indexed Jobs came with 1.22
def test_it_uses_nothing_that_a_cluster_of_1_20_lacks(path: Path) -> None:
    objects = render_file(path, kube=OLDEST).objects
    used = {(x["apiVersion"], x["kind"]) for x in objects if x["kind"] not in FOREIGN}
    assert used <= OLD_KINDS
    assert {f for x in objects if x["kind"] not in FOREIGN for f in fields_in(x)} & NEW_FIELDS == set()
    # the schemas of 1.25 are as strict about the fields that both versions have
    same = [x for x in objects if x["kind"] not in {*FOREIGN, "PodDisruptionBudget"}]
    assert [problem for x in same if (problem := problems(x, "1.25"))] == []


@each_file()
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


@each_file()
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


def test_what_the_chart_brings_along_is_what_lies_in_the_repository() -> None:
    for file in (CHART / "files" / "recipes").glob("*.toml"):
        assert file.read_text() == (CHART.parents[1] / "recipes" / file.name).read_text(), (
            f"copy recipes/{file.name} again"
        )
    assert len(list((CHART / "files" / "recipes").iterdir())) >= 3
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    from tba import __version__

    assert chart["appVersion"] == __version__


# ---- The chart makes what is kept in golden/: a change of a template is seen, and looked at, before it is merged ----


@pytest.mark.parametrize("name", CASES)
def test_the_chart_makes_what_is_kept(name: str) -> None:
    kept = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert made(name).splitlines() == kept, "look at the difference; if it is meant, run `make golden`"


# ---- Rules of checkov and kube-linter that the chart follows --------------------------------------------------------


LINTED = [*FILES, SEARCHERS]
PINNED = ("image", "buffer.image", "reward.image", "searcher.image", "trainer.image", "redis.image")
DIGESTS = [f"{part}.tag=1.2@sha256:{number:064x}" for number, part in enumerate(PINNED)]


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


def test_no_registry_is_asked_for_images_that_are_present() -> None:
    made = render_file(CHART / "values-cpu-quickstart.yaml", "--set", "image.registry=,image.present=true")
    containers = [container for pod in made.pods() for container in pod.containers]
    found = {(each["image"].rpartition(":")[0], each["imagePullPolicy"]) for each in containers}
    ours = {(f"tba-{part}", "Never") for part in ("buffer", "reward", "searcher", "trainer", "objectstore")}
    assert found == {("redis", "IfNotPresent"), *ours}
