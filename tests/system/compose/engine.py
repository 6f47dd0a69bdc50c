"""`docker compose` of this repository as one throw-away project, and what it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tba.api import RunInfo
from tba.clients import BufferClient
from tba.errors import TbaError
from tba.tokens import operator_token
from tests.system.cluster.kube import StageError

ROOT = Path(__file__).parents[3]
FILES = ("-f", str(ROOT / "docker-compose.yml"), "--env-file", str(ROOT / "deploy/cpu.env"))


def why_not() -> str | None:
    if shutil.which("docker") is None:
        return "docker is not on PATH"
    for words in (("docker", "info", "--format", "{{.ServerVersion}}"), ("docker", "compose", "version", "--short")):
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60)
        if answer.returncode != 0:
            return f"`{' '.join(words)}` fails: {answer.stderr.strip()[-300:]}"
    return None


class Project:
    """One Compose project."""

    def __init__(self, name: str, folder: Path, *, port: int) -> None:
        self.name = name
        secrets = folder / "secrets"
        subprocess.run([str(ROOT / "deploy/make-secrets"), str(secrets)], check=True, capture_output=True)
        self._environ = {**os.environ, "TBA_SECRETS": str(secrets), "TBA_BUFFER_PORT": str(port)}
        token = operator_token(secrets / "tokens/operator.json")
        self.url, self.tokens_file = f"http://127.0.0.1:{port}", secrets / "tokens/operator.json"
        self._client = BufferClient(self.url, token=token, retry_s=0.1)

    def compose(self, *words: str, check: bool = True, timeout_s: float = 900) -> str:
        """Run `docker compose` and return its stdout."""
        return run(
            "docker",
            "compose",
            "-p",
            self.name,
            *FILES,
            *words,
            check=check,
            timeout_s=timeout_s,
            environ=self._environ,
        )

    def container(self, service: str) -> str:
        found = self.compose("ps", "--all", "--quiet", service).split()
        if len(found) != 1:
            raise StageError(f"service {service} has {len(found)} containers")
        return found[0]

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(run("docker", "inspect", self.container(service)))[0]

    def kill(self, service: str) -> None:
        """kill -9 of the service's process from within, so that the engine sees a crash and its restart policy acts."""
        run(
            "docker", "exec", self.container(service), "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)", check=False
        )

    def info(self) -> RunInfo | None:
        try:
            return self._client.run()
        except TbaError:
            return None

    def step(self) -> int:
        info = self.info()
        return -1 if info is None else info.step

    def rollouts(self) -> int:
        return self._client.stats().pushed["new"]

    def left_over(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.name}"
        kinds = (("container", "--all"), ("volume",), ("network",))
        return [
            f"{kind} {name}"
            for kind, *more in kinds
            for name in run("docker", kind, "ls", "--quiet", *more, "--filter", label).split()
        ]

    def volumes(self) -> set[str]:
        label = f"label=com.docker.compose.project={self.name}"
        return set(run("docker", "volume", "ls", "--quiet", "--filter", label).split())

    def used_volumes(self) -> set[str]:
        containers = self.compose("ps", "--all", "--quiet").split()
        about = json.loads(run("docker", "inspect", *containers))
        return {mount["Name"] for each in about for mount in each["Mounts"] if mount["Type"] == "volume"}

    def why(self) -> str:
        return self.compose("ps", "--all", check=False) + self.compose("logs", "--tail", "25", check=False)


def run(*words: str, check: bool = True, timeout_s: float = 300, environ: dict[str, str] | None = None) -> str:
    """Run a command and return its stdout."""
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, env=environ)
    except subprocess.TimeoutExpired:
        raise StageError(f"`{' '.join(words)}` took longer than {timeout_s:.0f} s") from None
    if check and answer.returncode != 0:
        raise StageError(f"`{' '.join(words)}` ended with {answer.returncode}: {answer.stderr.strip()[-2000:]}")
    return answer.stdout
