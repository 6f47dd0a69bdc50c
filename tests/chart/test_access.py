"""The rights of each service account in the cluster, and the connections that network policies allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import (
    BARE,
    EXTERNAL,
    NODES,
    QUICKSTART,
    Pod,
    Rendering,
    each_file,
    needs_helm,
    quickstart,
    render_file,
)
from tests.support.secrets_seen import SEEN, Seen, secrets_of_kubernetes, store_seen, tokens_seen

pytestmark = needs_helm


@each_file()
def test_only_who_scales_and_who_stops_is_given_a_token_of_the_api(path: Path) -> None:
    made = render_file(path)
    scales = any(x["metadata"]["name"] == "t-scale" for x in made.of("Role"))
    for pod in made.pods():
        wanted = pod.component == "stop" or (scales and pod.component == "buffer")
        assert pod.spec["automountServiceAccountToken"] is wanted, pod.name
    for account in made.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    assert made.of("ClusterRole") == made.of("ClusterRoleBinding") == []


def secrets_named(pod: Pod) -> dict[str, set[str]]:
    """Name of each Secret that a pod sees -> the keys of it."""
    found: dict[str, set[str]] = {}
    for volume in pod.spec.get("volumes", []):
        assert "projected" not in volume, "look into it here too"
        if secret := volume.get("secret"):
            found.setdefault(secret["secretName"], set()).update(item["key"] for item in secret["items"])
    for container in pod.containers:
        assert "envFrom" not in container
        for entry in container.get("env", []):
            if secret := entry.get("valueFrom", {}).get("secretKeyRef"):
                found.setdefault(secret["name"], set()).add(secret["key"])
    return found


@pytest.mark.parametrize("needs_models", [False, True], ids=["", "needsModels"])
def test_every_pod_sees_its_own_secrets_alone(needs_models: bool, tmp_path: Path) -> None:
    """With the Secrets that deploy/make-secrets prints; the table is the one of docs/security.md."""
    made = render_file(QUICKSTART, "--set", f"reward.needsModels={str(needs_models).lower()}")
    secrets = secrets_of_kubernetes(tmp_path / "secrets")
    seen = {}
    for pod in made.pods():
        named = secrets_named(pod)
        for secret, keys in named.items():
            assert keys <= secrets[secret].keys(), f"{pod.name}: {secret} has no {keys - secrets[secret].keys()}"
        files = [tmp_path / "secrets" / "tokens" / key for key in named.get("tba-tokens", ())]
        sends, checks = tokens_seen(files)
        pairs = {secrets[name]["AWS_ACCESS_KEY_ID"] for name in named if name.startswith("tba-store")}
        others = named.keys() - {"tba-tokens", "tba-store", "tba-store-read"}
        assert others <= {"tba-redis"}
        component = "reward with needsModels" if needs_models and pod.component == "reward" else pod.component
        other = "password of Redis" if others else "none"
        seen[component] = Seen(sends, checks, store_seen(pairs), other)
    assert seen == {component: SEEN[component] for component in seen}
    assert len(seen) == len(list(made.pods())) == 9


def test_keys_of_the_store_are_those_that_the_values_name() -> None:
    named = {pod.component: secrets_named(pod).keys() for pod in render_file(EXTERNAL).pods()}
    assert {component for component, names in named.items() if "s3" in names} == {"buffer", "trainer", "setup"}
    assert {component for component, names in named.items() if "s3-read" in names} == {"searcher"}
    tokens = {pod.component: secrets_named(pod).get("tokens", set()) for pod in render_file(EXTERNAL).pods()}
    assert tokens == {
        "buffer": {"buffer.json"},
        "reward": {"reward.json"},
        "searcher": {"searcher.json"},
        "trainer": {"trainer.json"},
        "setup": {"operator.json"},
        "test": {"searcher.json", "viewer.json"},
        "stop": set(),
    }


@each_file()
def test_every_pod_has_an_account_of_its_own(path: Path) -> None:
    made = render_file(path)
    used = {pod.component: pod.spec["serviceAccountName"] for pod in made.pods()}
    assert "default" not in used.values()
    if path == BARE:
        assert made.of("ServiceAccount") == []
    else:
        assert len(set(used.values())) == len(used)
        assert set(used.values()) == {x["metadata"]["name"] for x in made.of("ServiceAccount")}


def policies(made: Rendering) -> dict[str, dict[str, Any]]:
    """Component -> the spec of its NetworkPolicy."""
    found = {
        x["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: x["spec"]
        for x in made.of("NetworkPolicy")
    }
    assert len(found) == len(made.of("NetworkPolicy"))
    return found


def peers(rules: list[dict[str, Any]] | None, side: str) -> set[tuple[str, int | None]]:
    """(component or address range or namespace, port) of every rule but DNS."""
    found = set()
    for rule in rules or []:
        for port in [port["port"] for port in rule.get("ports", [{"port": None}])]:
            if port in {53, 5353}:
                continue
            for peer in rule[side]:
                labels = peer.get("podSelector", {}).get("matchLabels", {})
                who = labels.get("app.kubernetes.io/component") or peer.get("ipBlock", {}).get("cidr") or "namespaces"
                if labels:
                    assert labels["app.kubernetes.io/instance"] == "t", "another release's pods"
                found.add((who, port))
    return found


def test_what_the_quickstart_may_reach() -> None:
    found = policies(render_file(QUICKSTART))
    egress = {component: peers(spec["egress"], "to") for component, spec in found.items()}
    assert egress["reward"] == egress["redis"] == egress["objectstore"] == set()
    assert egress["trainer"] == {("buffer", 8700), ("objectstore", 9000)}
    ingress = {component: peers(spec["ingress"], "from") for component, spec in found.items()}
    assert ingress["redis"] == {("buffer", 6379)}
    assert ingress["searcher"] == ingress["trainer"] == ingress["setup"] == set()


@each_file(BARE)
def test_every_way_out_is_a_way_in_on_the_other_side(path: Path) -> None:
    found = policies(render_file(path))
    for component, spec in found.items():
        for other, port in peers(spec["egress"], "to"):
            if other in found and port is not None:
                assert (component, port) in peers(found[other]["ingress"], "from"), f"{component} -> {other}:{port}"


def test_the_scorers_reach_nothing_but_what_they_need() -> None:
    assert peers(policies(render_file(EXTERNAL))["reward"]["egress"], "to") == set()
    with_models = peers(policies(render_file(NODES))["reward"]["egress"], "to")
    assert with_models == {("0.0.0.0/0", 9000), ("::/0", 9000), ("namespaces", 9000)}


def test_an_external_store_and_redis_are_narrowed_by_values() -> None:
    found = policies(render_file(EXTERNAL))
    assert ("10.0.0.0/8", 8443) in peers(found["trainer"]["egress"], "to")
    assert ("10.1.0.0/16", 6380) in peers(found["buffer"]["egress"], "to")
    assert ("namespaces", 8700) in peers(found["buffer"]["ingress"], "from")
    assert not {who for who, _ in peers(found["buffer"]["egress"], "to")} & {"0.0.0.0/0", "::/0"}


NO_KEYS = "objectstore.enabled=false,store.credentialsSecret=,store.readOnlyCredentialsSecret="
OUTSIDE = (
    f"{NO_KEYS},store.endpointUrl=https://s3.example:8443,redis.enabled=false,redis.external.url=redis://r.example"
)
HOLDERS = {"buffer", "searcher", "trainer", "setup"}


def test_pods_without_keys_reach_where_their_service_account_gets_some() -> None:
    agent = {("169.254.170.23/32", 80), ("fd00:ec2::23/128", 80)}
    found = {part: peers(spec["egress"], "to") for part, spec in policies(quickstart(OUTSIDE)).items()}
    assert {part for part, rules in found.items() if agent <= rules} == HOLDERS
    assert {part for part, rules in found.items() if agent & rules} == HOLDERS
    with_keys = policies(render_file(EXTERNAL))
    assert not any(agent & peers(spec["egress"], "to") for spec in with_keys.values())
    other = "networkPolicy.podIdentity.ports={80,443},networkPolicy.podIdentity.to[0].ipBlock.cidr=10.8.0.0/16"
    moved = peers(policies(quickstart(OUTSIDE, other))["trainer"]["egress"], "to")
    assert {("10.8.0.0/16", 80), ("10.8.0.0/16", 443)} <= moved
    assert not agent & moved
