"""Renders charts/tba with the real Helm, once per set of arguments, and finds objects in the output."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tba"
SCENARIOS = ROOT / "tests" / "chart" / "values"
HELM = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
"""The helm on PATH, or the one that `make test` puts beside Python (tools/install_helm.py)."""
NO_HELM = "no helm on PATH"
needs_helm = pytest.mark.skipif(HELM is None, reason=NO_HELM)
OLDEST, NEWEST = "1.20.2", "1.37.0"
API_VERSIONS = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1")
RELEASE, NAMESPACE = "t", "lab"
KUBERNETES_API = ("--set", "networkPolicy.kubernetesApi.to[0].ipBlock.cidr=192.0.2.10/32")
"""The address of the Kubernetes API, which Helm would ask the cluster for; here there is no cluster."""
REGISTRY = ("--set", "image.registry=registry.example/tba")
"""The registry of the images, which no values file of the chart sets."""
SEARCHERS = CHART / "values-searchers.yaml"
OF_A_RUN = "recipeName=quickstart,searchersOnly.bufferUrl=http://run-buffer.far:8700,searchersOnly.rewardUrl=https://rewards.far"
_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


FILES = sorted(set(CHART.glob("values-*.yaml")) - {SEARCHERS}) + sorted(SCENARIOS.glob("*.yaml"))
"""The chart's own values files for a whole run, and the scenarios of its tests."""
QUICKSTART = CHART / "values-cpu-quickstart.yaml"
EXTERNAL, NODES, BARE = (SCENARIOS / f"{name}.yaml" for name in ("external", "nodes", "bare"))


def each_file(*left_out: Path) -> pytest.MarkDecorator:
    """Run a test for each file of FILES except those left out."""
    return pytest.mark.parametrize("path", [x for x in FILES if x not in left_out], ids=lambda path: path.stem)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template: the kind and name of the object that has it, its metadata and spec."""

    kind: str
    name: str
    metadata: dict[str, Any]
    spec: dict[str, Any]

    @property
    def component(self) -> str:
        return self.metadata["labels"]["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[dict[str, Any]]:
        """All containers, including init containers."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


@dataclass(frozen=True, slots=True)
class Rendering:
    """The output of Helm."""

    objects: list[dict[str, Any]] = field(repr=False)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, name: str) -> dict[str, Any]:
        """Return the one object with this name, or else the one whose name begins with it and a dash."""
        found = [x for x in self.of(kind) if x["metadata"]["name"] == name]
        found = found or [x for x in self.of(kind) if x["metadata"]["name"].startswith(f"{name}-")]
        assert len(found) == 1, f"{kind} {name}: {[x['metadata']['name'] for x in found]}"
        return found[0]

    def pods(self) -> Iterator[Pod]:
        for found in self.objects:
            if found["kind"] == "Pod":
                yield Pod("Pod", found["metadata"]["name"], found["metadata"], found["spec"])
            elif "template" in found.get("spec", {}):
                template = found["spec"]["template"]
                yield Pod(found["kind"], found["metadata"]["name"], template["metadata"], template["spec"])

    def pod(self, component: str) -> Pod:
        """Return the only pod template of a component."""
        found = [pod for pod in self.pods() if pod.component == component]
        assert len(found) == 1, f"{component}: {[pod.name for pod in found]}"
        return found[0]


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *args], capture_output=True, text=True, timeout=120)


def template(
    *args: str, kube: str = NEWEST, release: str = RELEASE, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """Run `helm template` as on a cluster of Kubernetes version `kube` that has the operators' kinds."""
    apis = [part for api in API_VERSIONS for part in ("--api-versions", api)]
    return helm(
        "template",
        release,
        str(chart),
        "--namespace",
        NAMESPACE,
        "--kube-version",
        kube,
        *apis,
        *KUBERNETES_API,
        *REGISTRY,
        *args,
    )


@lru_cache(maxsize=64)
def rendered_text(*args: str, kube: str = NEWEST) -> str:
    done = template(*args, kube=kube)
    assert done.returncode == 0, done.stderr
    return done.stdout


@lru_cache(maxsize=64)
def render(*args: str, kube: str = NEWEST) -> Rendering:
    documents = yaml.load_all(rendered_text(*args, kube=kube), Loader=_Loader)
    return Rendering([document for document in documents if document])


def render_file(path: Path, *more: str, kube: str = NEWEST) -> Rendering:
    return render(*arguments(path), *more, kube=kube)


def quickstart(*values: str) -> Rendering:
    return render("-f", str(QUICKSTART), *(part for value in values for part in ("--set", value)))


def environment(
    pod: Pod, secrets: Mapping[str, str] | None = None, *, container: dict[str, Any] | None = None
) -> dict[str, str]:
    """Return the environment variables of the first container, or of `container`; `secrets` has the values of those
    that come from a Secret."""
    found, known = {}, secrets or {}
    for entry in (container or pod.spec["containers"][0])["env"]:
        found[entry["name"]] = entry.get("value", known.get(entry["name"], "of-a-secret"))
    return found


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CHART / "files" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(path: Path) -> tuple[str, ...]:
    return ("-f", str(path), *(("--set", OF_A_RUN) if path == SEARCHERS else ()))


def refusal(*args: str, kube: str = NEWEST, release: str = RELEASE) -> str:
    """Assert that Helm refuses to render the chart; return its message."""
    done = template(*args, kube=kube, release=release)
    assert done.returncode != 0, "the chart was rendered"
    return " ".join(done.stderr.split())


class _Loader(_FAST):
    """Refuses a duplicate key, as Kubernetes' parser does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {sorted(keys)} {node.start_mark}"
        return super().construct_mapping(node, deep=deep)
