"""Strict validation of manifests against the schemas of Kubernetes releases (package kubernetes-validate)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kubernetes_validate import utils

VERSIONS = ("1.25", "1.29", "1.33", "1.37")
FOREIGN = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds of operators; the package has no schemas for them."""
OLD_KINDS = {
    ("v1", "ConfigMap"),
    ("v1", "Pod"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("batch/v1", "Job"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1beta1", "PodDisruptionBudget"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("scheduling.k8s.io/v1", "PriorityClass"),
}
"""The API versions that a cluster of 1.20 serves and the chart uses."""
NEW_FIELDS = {
    "appArmorProfile",
    "backoffLimitPerIndex",
    "completionMode",
    "grpc",
    "hostUsers",
    "matchLabelKeys",
    "maxFailedIndexes",
    "minDomains",
    "nodeAffinityPolicy",
    "nodeTaintsPolicy",
    "persistentVolumeClaimRetentionPolicy",
    "podFailurePolicy",
    "podReplacementPolicy",
    "resizePolicy",
    "successPolicy",
    "suspend",
    "trafficDistribution",
    "ttlSecondsAfterFinished",
    "unhealthyPodEvictionPolicy",
}
"""Fields that no cluster of 1.20 knows, or knows only behind a gate: its API server would drop or refuse them."""

_read = utils.schema_contents


@lru_cache(maxsize=256)
def _cached(filename: str, desired_version: str) -> Any:
    return _read(filename, desired_version)


def problems(manifest: dict[str, Any], version: str) -> str | None:
    """Validate a manifest with the strict schema of a release; return what is wrong, or None."""
    utils.schema_contents = _cached  # the package reads 2 MB again for every manifest
    try:
        utils.validate(manifest, version, strict=True)
    except utils.ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        return f"{manifest['kind']}/{manifest['metadata']['name']} {where}: {error.message}"
    except utils.SchemaNotFoundError as error:
        return error.message
    return None


def fields_in(node: Any) -> set[str]:
    """Return the names of all fields in a manifest, without the keys of maps such as labels."""
    if isinstance(node, list):
        return set().union(*(fields_in(child) for child in node))
    if not isinstance(node, dict):
        return set()
    data = {"data", "labels", "annotations", "matchLabels", "nodeSelector", "limits", "requests"}
    return set(node).union(*(fields_in(child) for key, child in node.items() if key not in data))
