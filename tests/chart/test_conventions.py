"""What users of charts expect: a way in from outside, and commands that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.test_access import peers, policies
from tests.support.chart import (
    CHART,
    NAMESPACE,
    OLDEST,
    QUICKSTART,
    REGISTRY,
    Rendering,
    helm,
    needs_helm,
    quickstart,
    render,
)
from tests.support.installed_objects import cluster_with
from tests.support.kube_schemas import problems

pytestmark = needs_helm


def rendered(values: dict[str, Any], folder: Path, kube: str = "1.37.0") -> Rendering:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return render("-f", str(QUICKSTART), "-f", str(path), kube=kube)


ROUTES = {
    "buffer": {
        "ingress": {"enabled": True, "className": "nginx", "hosts": ["a.example", "b.example"], "tlsSecret": "cert"}
    }
}


def test_the_page_and_the_api_are_reached_from_outside_and_nothing_else(tmp_path: Path) -> None:
    made = rendered(ROUTES, tmp_path, kube=OLDEST)
    service = made.one("Service", "t-buffer")
    ingress = made.one("Ingress", "t-buffer")
    assert problems(ingress, "1.25") is None
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["spec"]["tls"] == [{"secretName": "cert", "hosts": ["a.example", "b.example"]}]
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["a.example", "b.example"]
    for rule in ingress["spec"]["rules"]:
        paths = {(path["path"], path["pathType"]) for path in rule["http"]["paths"]}
        assert paths == {("/", "Exact"), ("/page", "Prefix"), ("/v1", "Prefix")}
        for path in rule["http"]["paths"]:
            assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "http"}}


@pytest.mark.parametrize("peer", [{}, {"matchLabels": {"name": "ingress"}}], ids=["any", "named"])
def test_the_controller_reaches_the_buffer_alone(peer: dict[str, Any], tmp_path: Path) -> None:
    named = {"networkPolicy": {"routesFrom": [{"namespaceSelector": peer}]}} if peer else {}
    found = policies(rendered(ROUTES | named, tmp_path))
    assert ("namespaces", 8700) in peers(found["buffer"]["ingress"], "from")
    (rule,) = found["buffer"]["ingress"]
    assert {"namespaceSelector": peer} in rule["from"]
    assert "namespaces" not in {who for who, _ in peers(found["reward"]["ingress"], "from")}
    assert "namespaces" not in {who for who, _ in peers(policies(quickstart())["buffer"]["ingress"], "from")}


def notes(tmp_path: Path, *words: str) -> str:
    with cluster_with([], tmp_path) as kubeconfig:
        sets = ("--set", "networkPolicy.kubernetesApi.to[0].ipBlock.cidr=192.0.2.10/32", *words)
        flags = ("--dry-run=client", "--kubeconfig", str(kubeconfig))
        done = helm("install", "t", str(CHART), "-n", NAMESPACE, "-f", str(QUICKSTART), *REGISTRY, *sets, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_the_command_for_secrets_fits_their_names_and_the_keys_of_each_role(tmp_path: Path) -> None:
    plain = notes(tmp_path)
    assert "deploy/make-secrets --kubernetes lab | kubectl apply -f -" in plain
    assert "create secret" not in plain
    assert (
        """get secret tba-tokens -o go-template='{{index .data "operator.json" | base64decode}}' | kubectl""" in plain
    )
    sets = "auth.existingSecret=mine,buffer.ingress.enabled=true,buffer.ingress.hosts[0]=run.example"
    said = notes(tmp_path, "--set", sets)
    assert "make-secrets --kubernetes" not in said
    (line,) = [line for line in said.splitlines() if "create secret generic mine" in line]
    for role in ("buffer", "reward", "searcher", "trainer", "operator", "viewer"):
        assert f"--from-file=secrets/tokens/{role}.json" in line
    assert "create secret generic tba-redis --from-file=redis-password=secrets/redis_password" in said
    assert """get secret mine -o go-template='{{index .data "operator.json" | base64decode}}'""" in said
    assert "The page: http://run.example/" in said
    assert "buffer.ingress.tlsSecret is empty" in said
    assert "networkPolicy.routesFrom is empty" in said
