"""A server with the part of the Kubernetes API that Helm's `lookup` uses, and a kubeconfig for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import loopback

KINDS = {
    "v1": ("ConfigMap", "Service", "ServiceAccount", "Pod", "Endpoints"),
    "apps/v1": ("StatefulSet", "Deployment"),
    "batch/v1": ("Job",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "scheduling.k8s.io/v1": ("PriorityClass",),
}
"""Group version -> the kinds of it that the chart makes or looks up."""
OF_CLUSTER = {"PriorityClass"}
"""Kinds that have no namespace."""
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "kubernetes", "namespace": "default"},
    "spec": {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00::1"]},
}
ENDPOINTS = {
    "apiVersion": "v1",
    "kind": "Endpoints",
    "metadata": {"name": "kubernetes", "namespace": "default"},
    "subsets": [{"addresses": [{"ip": "192.0.2.10"}, {"ip": "192.0.2.11"}], "ports": [{"port": 6443}]}],
}


@contextmanager
def cluster_with(objects: Sequence[dict[str, Any]], folder: Path) -> Iterator[Path]:
    """Run a server for a cluster with these objects; yield the path of its kubeconfig."""
    answers = _answers(objects)

    class Handler(loopback.Handler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            json_type = {"content-type": "application/json"}
            self.answer(200 if path in answers else 404, answers.get(path, missing), json_type)

    with loopback.Server(Handler) as server:
        config = folder / "kubeconfig"
        config.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "c",
                }
            )
        )
        yield config


def _answers(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answers by path: version, API discovery, every object, and the lists of objects."""
    found: dict[str, Any] = {"/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}}
    found["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    groups = []
    for group, kinds in KINDS.items():
        root = f"/api/{group}" if group == "v1" else f"/apis/{group}"
        plurals = {kind: _plural(kind) for kind in kinds}
        resources = [
            {"name": plural, "namespaced": kind not in OF_CLUSTER, "kind": kind, "verbs": ["get", "list"]}
            for kind, plural in plurals.items()
        ]
        found[root] = {"kind": "APIResourceList", "groupVersion": group, "resources": resources}
        if group != "v1":
            version = {"groupVersion": group, "version": group.partition("/")[2]}
            groups.append({"name": group.partition("/")[0], "versions": [version], "preferredVersion": version})
        for kind, plural in plurals.items():
            for namespace in ("default", "lab"):
                path = f"{root}/namespaces/{namespace}/{plural}"
                here = [x for x in objects if (x["kind"], x["metadata"].get("namespace", "lab")) == (kind, namespace)]
                found[path] = {"kind": f"{kind}List", "apiVersion": group, "metadata": {}, "items": here}
                found.update({f"{path}/{item['metadata']['name']}": item for item in here})
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return found


def _plural(kind: str) -> str:
    return {"NetworkPolicy": "networkpolicies", "Endpoints": "endpoints", "PriorityClass": "priorityclasses"}.get(
        kind, f"{kind.lower()}s"
    )
