"""Installations that cannot work: what a person sees of the reason in the status and logs of pods."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

from tests.system.cluster.kube import get, minutes, run, until
from tests.system.cluster.release import CHART, Release
from tests.system.cluster.stages import Report

DEADLINE_S = 180.0


def everything(namespace: str, more: list[str], report: Report) -> None:
    """Every fault in a release of its own, in the namespace that has the Secrets; `more` says where images are."""
    cases: dict[str, tuple[list[str], Callable[[Release], bool]]] = {
        "a missing Secret of tokens": (["auth.existingSecret=nowhere"], lambda release: "nowhere" in events(release)),
        "a store that is not there": (
            ["objectstore.enabled=false", "store.endpointUrl=http://nowhere.invalid:9000"],
            lambda release: "nowhere.invalid" in last_words(release),
        ),
        "more GPUs than any node has": (
            ["trainer.gpu.count=64"],
            lambda release: "Insufficient nvidia.com/gpu" in events(release),
        ),
        "a token of another role": (
            ["auth.existingSecret=of-a-viewer"],
            lambda release: "role" in last_words(release) and "viewer" in last_words(release),
        ),
    }
    make_a_tokens_file_of_a_viewer(namespace)
    for number, (name, (sets, is_told)) in enumerate(cases.items()):
        release = Release(f"bad{number}", namespace, [Path(CHART / "values-cpu-quickstart.yaml")], [*more, *sets])
        with report.stage(name):
            try:
                release.helm("install", "--timeout", minutes(2))
                until("a pod says why", lambda check=is_told, r=release: check(r), deadline_s=DEADLINE_S)
            finally:
                run("helm", "uninstall", release.name, "-n", namespace, "--ignore-not-found", check=False)
                claims = f"app.kubernetes.io/instance={release.name}"
                run("kubectl", "-n", namespace, "delete", "pvc", "-l", claims, "--wait=false", check=False)


def make_a_tokens_file_of_a_viewer(namespace: str) -> None:
    data = get(namespace, "secret", "tba-tokens")["data"]
    tokens = {key: base64.b64decode(value).decode() for key, value in data.items()}
    tokens["searcher.json"] = json.dumps({"searcher": json.loads(tokens["viewer.json"])["viewer"]})
    metadata = {"name": "of-a-viewer", "namespace": namespace}
    document = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": tokens}
    run("kubectl", "apply", "-f", "-", stdin=json.dumps(document))


def events(release: Release) -> str:
    lines = run("kubectl", "-n", release.namespace, "get", "events", check=False).stdout.splitlines()
    return "\n".join(line for line in lines if release.name in line)


def last_words(release: Release) -> str:
    """Termination messages of the release's containers, as `kubectl describe pod` shows them, and the ends of logs."""
    words = []
    for pod in release.pods():
        status = pod["status"]
        for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
            for when in ("state", "lastState"):
                words.append(container.get(when, {}).get("terminated", {}).get("message", ""))
        name = pod["metadata"]["name"]
        logs = run("kubectl", "-n", release.namespace, "logs", name, "--all-containers", "--tail=20", check=False)
        words.append(logs.stdout)
    return "\n".join(words)
