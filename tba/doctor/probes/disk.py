"""Room on the disks that the recipe writes to, in shared memory, and for open files."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tba.doctor.finding import Finding, fail, ok, warn
from tba.doctor.patient import Patient

GIB = 2**30
MIN_FREE_BYTES = 1 * GIB
MIN_SHM_BYTES = 1 * GIB
MIN_OPEN_FILES = 4096
SHARED_MEMORY = Path("/dev/shm")


def probe_disk(patient: Patient) -> Iterator[Finding]:
    """Free space where the services write."""
    for what, path in _places(patient).items():
        weights_bytes = 0 if what in ("runs", "caches") else _weights_bytes(patient)
        yield _free(what, path, need_bytes=max(MIN_FREE_BYTES, weights_bytes))
    yield from _shared_memory(patient)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        yield warn(
            "open-files",
            f"a process may open {soft} files here",
            f"raise the limit to {MIN_OPEN_FILES} or more (ulimit -n, LimitNOFILE, the container runtime): every "
            "client of the buffer is an open file",
        )
    else:
        yield ok(
            "open-files", f"a process may open {'any number of' if soft == resource.RLIM_INFINITY else soft} files"
        )


def _places(patient: Patient) -> dict[str, Path]:
    places = {"temporary files": Path(tempfile.gettempdir())}
    if (caches := Path.home() / ".cache").is_dir():
        places["caches"] = caches
    if patient.is_local:
        places["runs"] = Path(patient.recipe.local.runs_dir)
    scheme, _, rest = patient.recipe.store.url.partition("://")
    if scheme == "file" and rest.startswith("/"):
        places["the object store"] = Path(rest)
    return places


def _free(what: str, path: Path, *, need_bytes: int) -> Finding:
    there = path.expanduser().absolute()
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        return fail(
            "disk-writable",
            f"{there} ({what}) cannot be written by user {os.getuid()}",
            "mount a writable volume or tmpfs there, or give the user the folder",
        )
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.1f} GiB are free at {there} ({what}), and {need_bytes / GIB:.1f} GiB are wanted"
    if free < need_bytes:
        return warn("disk", text, "free some space, or mount a larger volume (emptyDir sizeLimit, tmpfs size)")
    return ok("disk", text)


def _weights_bytes(patient: Patient) -> int:
    """Two versions of the weights: the one in use and the one that is being pulled or written."""
    folder = Path(patient.recipe.model.path)
    if not {"trainer", "searcher"} & patient.services or not folder.is_dir():
        return 0
    return 2 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _shared_memory(patient: Patient) -> Iterator[Finding]:
    recipe = patient.recipe
    users = [
        name
        for name, uses in (
            ("a trainer of several processes", recipe.trainer.num_processes > 1 and "trainer" in patient.services),
            ("vLLM", recipe.searcher.engine == "vllm" and "searcher" in patient.services),
        )
        if uses
    ]
    if not SHARED_MEMORY.is_dir():
        if users:
            yield fail("shared-memory", f"there is no {SHARED_MEMORY}, which {users[0]} needs", "mount a tmpfs there")
        return
    total = shutil.disk_usage(SHARED_MEMORY).total
    text = f"{SHARED_MEMORY} has {total / GIB:.2f} GiB"
    if users and total < MIN_SHM_BYTES:
        yield warn(
            "shared-memory",
            f"{text}, little for {' and '.join(users)}",
            "give it 1 GiB or more (docker: shm_size; chart: shm.sizeLimit of trainer and searcher)",
        )
    else:
        yield ok("shared-memory", text)
