"""A trainer that hangs (SIGSTOP) is restarted by its liveness probe, here with the shorter patience of changed.yaml."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.system.cluster import faults
from tests.system.cluster.kube import ClusterError, get, run, until
from tests.system.cluster.midrun import until_it_continues
from tests.system.cluster.release import Release
from tests.system.cluster.stages import Report

BOUND_S = 30.0 + 4 * 5.0 + 20.0
"""As changed.yaml has it: the age of the sign of life, three attempts and one before, the grace of the pod."""
SLACK_S = 60.0
"""What a busy node may add to it."""
FREEZE = """
import os, signal, sys
from pathlib import Path

stopped = []
for folder in Path("/proc").glob("[0-9]*"):
    try:
        environ, command = ((folder / name).read_bytes() for name in ("environ", "cmdline"))
        if f"HOSTNAME={sys.argv[1]}".encode() in environ.split(b"\\0") and b"tba_trainer" in command:
            os.kill(int(folder.name), signal.SIGSTOP)
            stopped.append(folder.name)
    except OSError:
        pass  # it has ended, or belongs to another user
sys.exit(0 if stopped else "no process of that pod is here")
"""
"""From beside the pod: a container's first process ignores what a process within the container sends."""


def trainer(release: Release, report: Report) -> None:
    """Stop the trainer's process; the pod is replaced within the bound, and no rollout is lost."""
    with report.stage("a trainer that hangs") as found:
        (pod,) = release.pods("trainer")
        before = release.status()
        freeze(pod)
        begun_s, name = time.monotonic(), pod["metadata"]["name"]
        until(f"{name} is killed", lambda: code_of(pod), deadline_s=BOUND_S + SLACK_S)
        found |= {"killed_s": round(time.monotonic() - begun_s, 1), "bound_s": BOUND_S, "exit_code": code_of(pod)}
        if not any(name in line and "Liveness probe failed" in line for line in faults.events(release).splitlines()):
            raise ClusterError(f"{name} has ended, and no event says that it failed its liveness probe")
        found |= until_it_continues(release, before, is_restarted=True)


def freeze(pod: dict[str, Any]) -> None:
    """Send SIGSTOP to a trainer, by a pod of the same image and user that sees the processes of its node.

    Raises:
        ClusterError: it has found no process to stop.
    """
    spec, namespace = pod["spec"], pod["metadata"]["namespace"]
    container = {key: spec["containers"][0][key] for key in ("image", "imagePullPolicy", "securityContext")}
    container |= {"name": "freezer", "command": ["python", "-c", FREEZE, pod["metadata"]["name"]]}
    same = {key: spec[key] for key in ("nodeName", "securityContext", "imagePullSecrets", "tolerations") if key in spec}
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "freezer", "namespace": namespace},
        "spec": same
        | {"hostPID": True, "restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]},
    }
    run("kubectl", "apply", "-f", "-", stdin=json.dumps(manifest))
    try:
        ended = ("Succeeded", "Failed")
        phase = until(
            "the freezer has ended",
            lambda: next((p for p in ended if p == get(namespace, "pod", "freezer")["status"]["phase"]), None),
            deadline_s=120,
        )
        if phase == "Failed":
            raise ClusterError(run("kubectl", "-n", namespace, "logs", "freezer", check=False).stdout)
    finally:
        run("kubectl", "-n", namespace, "delete", "pod", "freezer", "--grace-period=0", "--force")


def code_of(pod: dict[str, Any]) -> int | None:
    """Return the exit code of the trainer's container once it has ended."""
    now = get(pod["metadata"]["namespace"], "pod", pod["metadata"]["name"])
    states = [status["state"] for status in now["status"]["containerStatuses"] if status["name"] == "trainer"]
    return next((state["terminated"]["exitCode"] for state in states if "terminated" in state), None)
