"""helm and kubectl as this test uses them: from PATH, or behind a prefix that brings a command to the cluster."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
PREFIX = shlex.split(os.environ.get("TBA_CLUSTER_PREFIX", ""))
"""For example `ssh node`, or a script that enters the namespace of a test cluster."""
LOAD = shlex.split(os.environ.get("TBA_CLUSTER_LOAD", ""))
"""Takes names of images and brings them into the cluster, for example `kind load docker-image`."""
PATIENCE = float(os.environ.get("TBA_CLUSTER_PATIENCE", "1"))
"""What every deadline is multiplied by, for a node that other work keeps busy."""


class StageError(Exception):
    """A command failed, or something never came true."""


def why_not() -> str | None:
    if not PREFIX:
        missing = [name for name in ("helm", "kubectl") if shutil.which(name) is None]
        if missing:
            return f"{' and '.join(missing)} not on PATH"
    done = run("kubectl", "get", "--raw", "/readyz", check=False, timeout_s=30)
    return None if done.returncode == 0 else f"no cluster answers: {done.stderr.strip() or done.stdout.strip()}"


def run(
    *command: str, check: bool = True, timeout_s: float = 300.0, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command where the cluster is."""
    try:
        done = subprocess.run(
            [*PREFIX, *command], capture_output=True, text=True, timeout=timeout_s * PATIENCE, input=stdin, check=False
        )
    except subprocess.TimeoutExpired:
        raise StageError(f"{' '.join(command)} did not end within {timeout_s * PATIENCE:g} s") from None
    if check and done.returncode != 0:
        raise StageError(f"{' '.join(command)} (exit code {done.returncode}):\n{done.stdout}{done.stderr}")
    return done


def minutes(number: float) -> str:
    return f"{number * 60 * PATIENCE:.0f}s"


def load(images: Sequence[str]) -> None:
    subprocess.run([*LOAD, *images], check=True, timeout=900 * PATIENCE, stdout=subprocess.DEVNULL)


def get(namespace: str, kind: str, *args: str) -> Any:
    return json.loads(run("kubectl", "-n", namespace, "get", kind, *args, "-o", "json").stdout)


def until(what: str, condition: Callable[[], T | None], *, deadline_s: float, every_s: float = 1.0) -> T:
    """Poll until `condition` returns something true; errors of commands count as not yet."""
    deadline_s *= PATIENCE
    end_s, last = time.monotonic() + deadline_s, ""
    while time.monotonic() < end_s:
        try:
            if value := condition():
                return value
        except StageError as error:
            last = f": {error}"
        time.sleep(every_s)
    raise StageError(f"within {deadline_s:g} s it never happened that {what}{last}")
