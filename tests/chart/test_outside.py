"""What pods may reach outside of the release: by peers, and with Cilium by names and entities."""

from __future__ import annotations

from typing import Any

from tests.chart.test_access import peers, policies
from tests.support.chart import CHART, SCENARIOS, SEARCHERS, Rendering, arguments, needs_helm, render

pytestmark = needs_helm
QUICKSTART = CHART / "values-cpu-quickstart.yaml"
CILIUM = ("--set", "networkPolicy.flavor=cilium,networkPolicy.kubernetesApi.to=null")
NO_KEYS = "objectstore.enabled=false,store.credentialsSecret=,store.readOnlyCredentialsSecret="
OUTSIDE = (
    f"{NO_KEYS},store.endpointUrl=https://s3.example:8443,redis.enabled=false,redis.external.url=redis://r.example"
)
HOLDERS = {"buffer", "searcher", "trainer", "setup", "check"}
ANYWHERE = ("cluster", "world")


def quickstart(*words: str) -> Rendering:
    """The quickstart with more values."""
    return render("-f", str(QUICKSTART), *(part for word in words for part in ("--set", word)))


def reached(made: Rendering) -> dict[str, set[tuple[tuple[str, ...], str]]]:
    """Component -> what its policy of Cilium lets it reach but DNS: (names or entities, port)."""
    found: dict[str, set[tuple[tuple[str, ...], str]]] = {}
    pods = {pod.component: pod.metadata["labels"] for pod in made.pods()}
    for policy in made.of("CiliumNetworkPolicy"):
        spec: dict[str, Any] = policy["spec"]
        assert spec.keys() == {"endpointSelector", "egress"}, "what comes in is the matter of NetworkPolicies"
        wanted = spec["endpointSelector"]["matchLabels"].items()
        (component,) = [name for name, labels in pods.items() if wanted <= labels.items()]
        rules = found.setdefault(component, set())
        dns, *others = spec["egress"]
        (ports,) = dns["toPorts"]
        assert [port["port"] for port in ports["ports"]] == ["53", "5353"]
        assert ports["rules"] == {"dns": [{"matchPattern": "*"}]}, "Cilium learns the addresses of names from answers"
        for rule in others:
            assert rule.keys() in ({"toFQDNs", "toPorts"}, {"toEntities", "toPorts"})
            names = [f"{how}={name}" for each in rule.get("toFQDNs", []) for how, name in each.items()]
            ports = [port["port"] for part in rule["toPorts"] for port in part["ports"]]
            rules |= {(tuple(sorted(rule.get("toEntities", names))), port) for port in ports}
    return found


def test_cilium_has_no_policies_unless_it_is_asked_for() -> None:
    assert reached(quickstart()) == {}


def test_with_cilium_buffer_and_stop_alone_reach_the_kubernetes_api_and_no_address_is_needed() -> None:
    made = render("-f", str(QUICKSTART), *CILIUM)
    found = reached(made)
    api = {(("kube-apiserver",), port) for port in ("443", "6443")}
    assert found == {pod.component: set() for pod in made.pods() if pod.component not in ("redis", "objectstore")} | {
        "buffer": api,
        "stop": api,
    }
    others = policies(made)
    # inside of the release nothing changes, and DNS is said once: without what Cilium reads there would be no names
    plain = policies(quickstart())
    for component, spec in others.items():
        assert spec["ingress"] == plain[component]["ingress"]
        inside = {peer for peer in peers(plain[component]["egress"], "to") if peer[0] in plain}
        assert peers(spec["egress"], "to") == inside, component
        assert not any(port["port"] == 53 for rule in spec["egress"] for port in rule.get("ports", []))


def test_with_cilium_what_has_no_name_is_anywhere_nodes_too() -> None:
    found = reached(render("-f", str(QUICKSTART), *CILIUM, "--set", f"{OUTSIDE},setup.prepare=true"))
    for component in HOLDERS:
        assert (ANYWHERE, "8443") in found[component]
    assert {component for component, rules in found.items() if (ANYWHERE, "8443") in rules} == HOLDERS
    assert {component for component, rules in found.items() if (ANYWHERE, "6379") in rules} == {"buffer"}
    assert {component for component, rules in found.items() if (ANYWHERE, "443") in rules} == {"setup"}
    assert found["reward"] == found["test"] == set()


def test_with_cilium_names_and_entities_take_the_place_of_anywhere() -> None:
    named = (
        "networkPolicy.store.hosts={s3.example,*.s3.example},networkPolicy.redis.entities={host,remote-node},"
        "networkPolicy.redis.to[0].ipBlock.cidr=10.1.0.0/16,networkPolicy.podIdentity.entities={host}"
    )
    made = render("-f", str(QUICKSTART), *CILIUM, "--set", OUTSIDE, "--set", named)
    found = reached(made)
    store = (("matchName=s3.example", "matchPattern=*.s3.example"), "8443")
    for component in HOLDERS:
        assert {store, (("host",), "80")} <= found[component]
    assert (("host", "remote-node"), "6379") in found["buffer"]
    assert not any(who == ANYWHERE for rules in found.values() for who, _ in rules)
    assert ("10.1.0.0/16", 6379) in peers(policies(made)["buffer"]["egress"], "to")
    assert not any(who == "0.0.0.0/0" for spec in policies(made).values() for who, _ in peers(spec["egress"], "to"))


def test_with_cilium_searchers_alone_reach_their_run() -> None:
    found = reached(render(*arguments(SEARCHERS), *CILIUM, "--set", "networkPolicy.run.hosts={rewards.far}"))
    assert {who for who, port in found["searcher"] if port in ("8700", "443")} >= {("matchName=rewards.far",)}


def test_peers_of_a_redis_and_a_store_in_the_cluster_are_pods_by_their_labels() -> None:
    where = "namespaceSelector.matchLabels.team=data,networkPolicy.{0}.to[0].podSelector.matchLabels.app={0}"
    sets = ",".join(f"networkPolicy.{target}.to[0].{where.format(target)}" for target in ("redis", "store"))
    made = policies(quickstart(f"{OUTSIDE},{sets}"))
    for component, port, target in (("buffer", 6379, "redis"), ("searcher", 8443, "store")):
        (rule,) = [rule for rule in made[component]["egress"] if {"port": port, "protocol": "TCP"} in rule["ports"]]
        labels = {
            "namespaceSelector": {"matchLabels": {"team": "data"}},
            "podSelector": {"matchLabels": {"app": target}},
        }
        assert rule["to"] == [labels]


def test_pods_without_keys_reach_where_their_service_account_gets_some() -> None:
    agent = {("169.254.170.23/32", 80), ("fd00:ec2::23/128", 80)}
    found = {part: peers(spec["egress"], "to") for part, spec in policies(quickstart(OUTSIDE)).items()}
    assert {part for part, rules in found.items() if agent <= rules} == HOLDERS
    assert {part for part, rules in found.items() if agent & rules} == HOLDERS
    with_keys = policies(render("-f", str(SCENARIOS / "external.yaml")))
    assert not any(agent & peers(spec["egress"], "to") for spec in with_keys.values())
    other = "networkPolicy.podIdentity.ports={80,443},networkPolicy.podIdentity.to[0].ipBlock.cidr=10.8.0.0/16"
    moved = peers(policies(quickstart(OUTSIDE, other))["trainer"]["egress"], "to")
    assert {("10.8.0.0/16", 80), ("10.8.0.0/16", 443)} <= moved
    assert not agent & moved
