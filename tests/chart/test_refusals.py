"""Values that could not work are refused at `helm template`, with a sentence each; every value is described."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from charts.tools.readme import at, described, text, undescribed
from tests.support.chart import CHART, OLDEST, needs_helm, refusal, template

pytestmark = needs_helm
REDIS = "redis.auth.existingSecret=r"
GOOD = f"{REDIS},recipeName=quickstart"
STORE = "store.credentialsSecret=w,store.readOnlyCredentialsSecret=r"
WEIGHTS = f"{GOOD},searcher.openai.weights.volume.persistentVolumeClaim.claimName=w"
SERVER = f"{WEIGHTS},searcher.replicas=1,searcher.openai.url=http://vllm:8000"
BUNDLED = f"{GOOD},{STORE},objectstore.enabled=true"
CASES: dict[str, str] = {
    REDIS: "recipe is required",
    f"{BUNDLED},recipe=x": "recipe and recipeName quickstart are both given",
    f"{REDIS},recipe=recipes/mine.toml": 'recipe is "recipes/mine.toml", which is not TOML',
    f"{REDIS},recipeName=chess": "recipeName chess is not a recipe of this chart, which has gsm8k",
    f"{GOOD},auth.existingSecret=": "auth.existingSecret is required",
    "recipeName=quickstart": "redis.auth.existingSecret is required for the bundled Redis",
    f"{GOOD},objectstore.enabled=true": "objectstore.enabled brings a store that checks two pairs of keys",
    f"{GOOD},store.credentialsSecret=w": "store.credentialsSecret w is for services that write",
    f"{GOOD},fullnameOverride=1.run": 'objects would be called "1.run"',
    f"{GOOD},image.registry=": "image.registry is empty, and nobody publishes tba-",
    f"{GOOD},image.tag=latest": "the tag of image tba-",
    f"{GOOD},store.url=file:///models": 'store.url is "file:///models"',
    f"{BUNDLED},store.endpointUrl=http://s3:9000": "store.endpointUrl http://s3:9000 names a store and objectstore",
    f"{GOOD},store.endpointUrl=s3:9000": 'store.endpointUrl is "s3:9000"',
    f"{GOOD},redis.external.url=redis://other:6379": "redis.external names a Redis and redis.enabled brings another",
    f"{GOOD},redis.enabled=false": "redis.enabled is false and redis.external names no other",
    f"{GOOD},redis.enabled=false,redis.external.url=redis://r,redis.external.urlSecret=r": "are both given",
    f"{GOOD},redis.enabled=false,redis.external.url=http://r": 'redis.external.url is "http://r"',
    f"{GOOD},redis.enabled=false,redis.external.url=redis://:secret@r:6379/0": "contains a password",
    f"{GOOD},redis.external.caSecret=ca": "redis.external.caSecret ca is for a Redis of yours",
    f"{GOOD},redis.enabled=false,redis.external.url=redis://r,redis.tls.existingSecret=s": "is for the bundled Redis",
    f"{GOOD},redis.enabled=false,redis.external.url=redis://r,redis.external.caSecret=ca": "is for TLS, and redis.ext",
    f"{GOOD},redis.enabled=false,redis.external.url=rediss://r,redis.external.caSecret=ca,tls.existingSecret=s": (
        "tls.existingSecret s brings the authorities that the buffer trusts, and redis.external.caSecret ca would not"
    ),
    f"{GOOD},searcher.replicas=0,scaling.backend=keda,scaling.keda.serverAddress=http://p": "makes an offline run",
    f"{GOOD},scaling.backend=keda": "scaling.keda.serverAddress is empty",
    f"{GOOD},scaling.backend=keda,scaling.keda.serverAddress=prometheus:9090": 'serverAddress is "prometheus:9090"',
    f"{GOOD},scaling.backend=keda,scaling.keda.serverAddress=http://p,scaling.keda.minReplicas=5,"
    "scaling.keda.maxReplicas=4": "scaling.keda.maxReplicas 4 is below scaling.keda.minReplicas 5",
    f"{GOOD},scaling.keda.serverAddress=http://p": "KEDA and `tba scale` would fight over one number",
    f"{GOOD},searcher.weightCache.volume.emptyDir.medium=": "weightCache.volume is an emptyDir, which belongs to one",
    f"{GOOD},searcher.replicas=9,scaling.maxSearchers=8": "searcher.replicas 9 is above scaling.maxSearchers 8",
    f"{GOOD},trainer.gpu.count=2,trainer.processesPerNode=4": "processesPerNode 4 is more than trainer.gpu.count 2",
    f"{GOOD},trainer.gpu.count=4,trainer.processesPerNode=2": "processesPerNode 2 is less than trainer.gpu.count 4",
    f"{GOOD},trainer.terminationGracePeriodSeconds=5": "trainer.terminationGracePeriodSeconds is 5",
    f"{GOOD},searcher.gpu.count=2": "searcher.gpu.count is 2 and searcher.tensor_parallel_size of the recipe is 1",
    f"{SERVER},searcher.replicas=2": "searcher.replicas is 2, and all searchers would load weights into the server",
    f"{SERVER},scaling.backend=keda,scaling.keda.serverAddress=http://p": "scaling.keda.maxReplicas is 8, and all sear",
    f"{SERVER},searcher.gpu.count=1": "searcher.gpu.count is 1 and searcher.openai.url http://vllm:8000 is given",
    f"{GOOD},searcher.openai.url=http://vllm:8000": "searcher.openai.weights.volume is empty: the server reads weights",
    f"{SERVER},searcher.openai.url=vllm:8000": 'searcher.openai.url is "vllm:8000", or more than that; give the',
    f"{SERVER},recipeName=,recipe=tensor_parallel_size=2": "the recipe is 2 and searcher.openai.url is given: the",
    f"{SERVER},searcher.openai.url=http://me:secret@vllm": 'searcher.openai.url is "http://vllm", or more than that',
    WEIGHTS: "searcher.openai has a token or weights and no url: nothing would use them",
    f"{REDIS},recipe=searcher = {{engine = 'openai'}}": 'searcher.engine of the recipe is "openai" and searcher.open',
    f"{REDIS},recipe=searcher = {{num_slots = 4\\, 'engine' = 'openai'}}": 'searcher.engine of the recipe is "openai"',
    f"{REDIS},recipe=tensor_parallel_size=2,searcher.shm.sizeLimit=": "searcher.shm.sizeLimit is empty: ranks talk",
    f"{GOOD},searcher.drainS=55": "searcher.terminationGracePeriodSeconds 60 is less than searcher.drainS 55",
    f"{GOOD},searcher.gpu.count=1,searcher.gpu.resource=": "searcher.gpu.count is 1 and searcher.gpu.resource is empty",
    f"{GOOD},serviceAccounts.create=false": "serviceAccounts.create is false and serviceAccounts.names has no buffer",
    f"{GOOD},setup.hubToken.existingSecret=hub": "setup.hubToken is for setup.prepare, which is false",
    f"{GOOD},setup.enabled=false,setup.prepare=true": "setup.prepare is true and setup.enabled is false",
    f"{GOOD},extraEnv[0].name=A,extraEnv[1].name=A": "extraEnv has A twice",
    f"{GOOD},extraEnv[0].name=A,extraEnv[0].value=1x,extraEnv[0].valueFrom.a=b": "extraEnv gives A by value and by",
    f"{GOOD},pod.extraContainers[0].name=x": "extraContainers of trainer: it is done when all its containers are",
    f"{GOOD},buffer.ingress.enabled=true": "buffer.ingress.enabled is true and buffer.ingress.hosts is empty",
    f"{GOOD},pod.extraVolumes[0].name=tmp": "extraVolumes of buffer has a volume tmp, as the chart has",
}
FOR_SEARCHERS = f"{GOOD},searchersOnly.enabled=true,scaling.backend=none,searchersOnly.rewardUrl=http://r:1"
CASES |= {
    f"{GOOD},networkPolicy.kubernetesApi.to=null": "name it in networkPolicy.kubernetesApi.to, a list of peers",
    f"{GOOD},searchersOnly.bufferUrl=http://b": "searchersOnly.bufferUrl http://b is given and searchersOnly",
    FOR_SEARCHERS: 'searchersOnly.bufferUrl is ""; give the URL of that service of the run',
    f"{FOR_SEARCHERS},searchersOnly.bufferUrl=run-buffer:8700": 'searchersOnly.bufferUrl is "run-buffer:8700"',
    f"{FOR_SEARCHERS},searchersOnly.bufferUrl=http://b,scaling.backend=kubernetes": "leaves the number of",
    f"{FOR_SEARCHERS},searchersOnly.bufferUrl=http://b,scaling.backend=keda,scaling.keda.serverAddress=http://p": (
        "scaling.keda.query is empty, and the chart's own query is for the buffer service of this release"
    ),
    f"{FOR_SEARCHERS},searchersOnly.bufferUrl=https://b,tls.existingSecret=s": "tls.existingSecret s is for buffer and",
    f"{FOR_SEARCHERS},searchersOnly.bufferUrl=http://b,serviceMonitor.enabled=true": "serviceMonitor.enabled brings",
}
OF_OLD_CLUSTERS = {
    f"{GOOD},trainer.nodes=2": "trainer.nodes is 2, which needs indexed Jobs of Kubernetes 1.22 or newer"
}
OF_UPGRADES = {f"{GOOD},trainer.fixedJobName=true": "Kubernetes does not let Helm change a Job; it is for Argo CD"}
OF_NAMES = {"2nd.run": 'objects would be called "2nd.run", and a Service has small letters'}
"""Name of the release -> sentence."""
NOT_REACHED = {r"environment of %s: %s"}
"""Guards against faults of the templates themselves. test_upgrades.py has the comparisons with a cluster."""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    found = {values: refusal("--set", values) for values in CASES}
    found |= {values: refusal("--set", values, kube=OLDEST) for values in OF_OLD_CLUSTERS}
    found |= {values: refusal("--set", values, "--is-upgrade") for values in OF_UPGRADES}
    return found | {name: refusal("--set", GOOD, release=name) for name in OF_NAMES}


@pytest.mark.parametrize("values", [*CASES, *OF_OLD_CLUSTERS, *OF_UPGRADES, *OF_NAMES])
def test_impossible_values_are_refused_with_a_sentence(values: str, said: dict[str, str]) -> None:
    assert (CASES | OF_OLD_CLUSTERS | OF_UPGRADES | OF_NAMES)[values] in said[values]
    assert "specifications of the schema" not in said[values], "the schema came first: the sentence is never seen"


def test_every_sentence_of_the_templates_is_tried(said: dict[str, str]) -> None:
    sentences = set()
    for file in CHART.glob("templates/**/*"):
        if file.suffix in {".tpl", ".yaml"} and file.name != "_installed.tpl":
            sentences.update(re.findall(r'\bfail \(?(?:printf )?"((?:[^"\\]|\\.)*)"', file.read_text()))
            sentences.update(re.findall(r'\brequired "((?:[^"\\]|\\.)*)"', file.read_text()))
    assert len(sentences) > 20
    everything = list(said.values())
    untried = [sentence for sentence in sentences if not any(says(sentence, text) for text in everything)]
    assert set(untried) == NOT_REACHED & sentences


def says(sentence: str, text: str) -> bool:
    """Return True if a text contains this sentence with its %s, %d and %q filled in."""
    pattern = r".+?".join(re.escape(part) for part in re.split(r"%[sdqv]", sentence.replace('\\"', '"')))
    return re.search(pattern, text) is not None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("sercher.replicas=3", "sercher"),
        ("networkPolicy.dns.port=53", "port"),
        ("searcher.replicas=three", "replicas"),
        ("searcher.replicas=-1", "replicas"),
        ("scaling.backend=magic", "backend"),
        ("auth.existingSecret=Not_A_Name", "existingSecret"),
        ("searcher=null", "searcher"),
        ("networkPolicy.dns.ports=null", "ports"),  # no ports would be all ports
        ("networkPolicy.metricsFrom[0].pod=x", "metricsFrom"),
        ("redis.persistence.size=0Gi", "size"),
        ("redis.maxmemory=12Gi", "maxmemory"),
        ("networkPolicy.extraEgress.rewards[0].to=x", "rewards"),
        ("searcher.resources.limits.memory=lots", "memory"),
        ("extraEnv[0].name=a-b c", "name"),
    ],
)
def test_the_schema_refuses_unknown_keys_and_wrong_types(values: str, sentence: str) -> None:
    text = refusal("--set", f"{GOOD},{values}")
    assert "specifications of the schema" in text
    assert sentence in text


def test_the_schema_knows_every_value_and_no_other() -> None:
    """The check goes down to the described values; the fields inside those belong to Kubernetes."""
    text = (CHART / "values.yaml").read_text()
    schema, values = yaml.safe_load((CHART / "values.schema.json").read_text()), yaml.safe_load(text)
    ends = {value.path for value in described(text)}

    def compare(node: dict[str, Any], value: Any, path: tuple[str, ...]) -> list[str]:
        while "$ref" in node:
            node = at(schema, node["$ref"].removeprefix("#/").split("/"))
        if path in ends:
            return []
        found = [".".join((*path, key)) for key in node["properties"].keys() ^ value.keys()]
        for key in node["properties"].keys() & value.keys():
            found += compare(node["properties"][key], value[key], (*path, key))
        return found

    assert compare(schema, values, ()) == []


def test_global_values_of_a_parent_chart_are_let_through() -> None:
    done = template("--set", f"{BUNDLED},global.somethingOfTheParent=1")
    assert done.returncode == 0, done.stderr


VALUES = (CHART / "values.yaml").read_text()


def test_every_value_is_described() -> None:
    assert undescribed(VALUES) == []


def test_the_readme_is_what_values_make() -> None:
    assert (CHART / "README.md").read_text() == text(), "run `make chart-docs`"
