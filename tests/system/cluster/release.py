"""One release of the chart: installing it, looking at its run through REST, killing its pods."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.system.cluster.kube import LOAD, StageError, get, run, until

CHART = Path("charts/tba")
SECRETS = ("tba-tokens", "tba-redis", "tba-store", "tba-store-read")
KINDS = ("searcher", "reward", "buffer", "trainer", "redis", "objectstore")


class Release:
    """A release in a namespace of its own."""

    def __init__(self, name: str, namespace: str, values: Sequence[Path], sets: Sequence[str]) -> None:
        self.name, self.namespace = name, namespace
        self._values, self._sets = values, [*(["image.present=true"] if LOAD else []), *sets]
        self._selector = f"app.kubernetes.io/instance={name}"
        self._operator = ""

    def make_namespace(self) -> None:
        run("kubectl", "create", "namespace", self.namespace)
        with tempfile.TemporaryDirectory() as folder:
            command = ["deploy/make-secrets", folder, "--kubernetes", self.namespace]
            made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            self._operator = (Path(folder) / "tokens" / "operator.json").read_text()
        run("kubectl", "apply", "-f", "-", stdin=made)

    def helm(self, verb: str, *args: str) -> str:
        """`helm install|upgrade` with this release's values; the values of `args` come after them."""
        values = [word for path in self._values for word in ("--values", str(path))]
        flags = [word for pair in self._sets for word in ("--set", pair)]
        return run("helm", verb, self.name, str(CHART), "-n", self.namespace, *values, *flags, *args).stdout

    def images(self) -> list[str]:
        return sorted(
            set(re.findall(r'^ *image: "?([^"\s]+)', self.helm("template", "--dry-run=server"), flags=re.MULTILINE))
        )

    def pods(self, component: str | None = None) -> list[dict[str, Any]]:
        """Pods that have not ended and are not on their way out, of one component or of all."""
        selector = self._selector + (f",app.kubernetes.io/component={component}" if component else "")
        items = get(self.namespace, "pods", "-l", selector)["items"]
        over = ("Succeeded", "Failed")
        return [
            pod for pod in items if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in over
        ]

    def ready(self, component: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self._ready(component)]

    def ready_uids(self, component: str) -> set[str]:
        """Return the uids of the same pods; a pod of a StatefulSet has the name of the one before it."""
        return {pod["metadata"]["uid"] for pod in self._ready(component)}

    def _ready(self, component: str) -> list[dict[str, Any]]:
        return [
            pod
            for pod in self.pods(component)
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        ]

    def tba(self, *words: str, timeout_s: float = 60.0) -> str:
        """`tba ...` inside the buffer's pod, as the operator: the REST API as a person would use it."""
        names = self.ready("buffer")
        if not names:
            raise StageError("the buffer has no ready pod")
        target = ["--url", "http://127.0.0.1:8700", "--token-file", "-"]
        words = (words[0], *words[1:], *target)
        return run("kubectl", "-n", self.namespace, "exec", "-i", names[0], "-c", "buffer", "--", "tba", *words,
                   timeout_s=timeout_s, stdin=self._operator).stdout  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Return the output of `tba status --json`."""
        for _ in range(3):
            if text := self.tba("status", "--json").strip():
                return json.loads(text)
        raise StageError("kubectl exec ended well three times and brought no output of tba status")

    def step(self) -> int:
        return int(self.status()["run"]["step"])

    def until_step(self, step: int, *, deadline_s: float) -> float:
        begun_s = time.monotonic()
        until(f"step {step} is reached", lambda: self.step() >= step, deadline_s=deadline_s)
        return time.monotonic() - begun_s

    def kill(self, component: str) -> list[str]:
        """Delete the pods of a component at once, without any grace; returns their uids."""
        pods = self.pods(component)
        if not pods:
            raise StageError(f"there is no pod of {component} to kill")
        names = [pod["metadata"]["name"] for pod in pods]
        run("kubectl", "-n", self.namespace, "delete", "pod", *names, "--grace-period=0", "--force", "--wait=false")
        return [pod["metadata"]["uid"] for pod in pods]

    def left_over(self) -> list[str]:
        """Return all objects with this release's label or in its namespace, except those of the test itself."""
        kinds = run("kubectl", "api-resources", "--verbs=list", "--namespaced", "-o", "name").stdout.split()
        kinds = [kind for kind in kinds if not kind.startswith(("events", "componentstatuses"))]
        found = run("kubectl", "-n", self.namespace, "get", ",".join(kinds), "-o", "name", "--ignore-not-found",
                    check=False).stdout.split()  # fmt: skip
        wide = ["clusterrole", "clusterrolebinding", "priorityclass"]
        found += run("kubectl", "get", ",".join(wide), "-l", self._selector, "-o", "name").stdout.split()
        own = (*(f"secret/{name}" for name in SECRETS), "serviceaccount/default", "configmap/kube-root-ca.crt")
        return [name for name in found if name not in own and not name.startswith("secret/default-token-")]

    def why(self) -> str:
        """Pods, their last words and the newest events: what a person would look at."""
        parts = [run("kubectl", "-n", self.namespace, "get", "pods,jobs", "-o", "wide", check=False).stdout]
        for pod in self.pods():
            name = pod["metadata"]["name"]
            logs = run("kubectl", "-n", self.namespace, "logs", name, "--all-containers", "--tail=15", check=False)
            parts.append(f"--- {name}\n{logs.stdout}{logs.stderr}")
        events = run("kubectl", "-n", self.namespace, "get", "events", "--sort-by=.lastTimestamp", check=False).stdout
        return "\n".join([*parts, "\n".join(events.splitlines()[-25:])])
