"""What checkov and kube-linter look for, and the chart keeps; docs/deploy.md lists the rest, with reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.chart import OLDEST, SCENARIOS, SEARCHERS, needs_helm, render, render_file, value_files

pytestmark = needs_helm
LINTED = [*value_files(), SEARCHERS]
DIGESTS = [
    f"{part}.image.digest=sha256:{number:064x}"
    for number, part in enumerate(("buffer", "reward", "searcher", "trainer", "redis", "objectstore"))
]


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
            assert re.fullmatch(r"registry\.company:5000/tba/[a-z-]+@sha256:[0-9a-f]{64}", image), image


def test_a_digest_makes_the_tag_unimportant() -> None:
    sets = f"{','.join(DIGESTS)},image.tag=latest,redis.image.tag=latest"
    quickstart = next(path for path in LINTED if path.stem == "values-cpu-quickstart")
    images = {c["image"] for pod in render("-f", str(quickstart), "--set", sets).pods() for c in pod.containers}
    assert all("@sha256:" in image and "latest" not in image for image in images)
