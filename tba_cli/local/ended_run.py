"""Save or read the buffer of a run that has ended: start its Redis and a buffer service for as long as it takes.

To read, both are started over a copy of the files, so that nothing in the run folder changes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tba.api import SnapshotInfo
from tba.clients import BufferClient
from tba.config import load_recipe
from tba.errors import ConfigError, ServiceError, TbaError, WaitTimeoutError
from tba.tokens import operator_client_token
from tba_cli.console import Console
from tba_cli.local.processes import ProcessManager, run_with_processes
from tba_cli.local.services import Services, wait_until_ready
from tba_cli.redis_server import find_redis_server, wait_for_redis
from tba_cli.resolve import with_real_addresses
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import save_snapshot

T = TypeVar("T")
CALL_RETRY_S = 5.0


class _ReadableError(Exception):
    """The buffer is not ready, because nobody has accepted a loss of Redis; it answers reads all the same."""


def save_ended(folder: RunFolder, name: str, *, console: Console, show: Callable[[SnapshotInfo], None]) -> SnapshotInfo:
    """Save the buffer of a run that has ended; its folder is locked meanwhile.

    Raises:
        ConfigError: no run began in this folder, or it is in progress.
        ChildError: Redis or the buffer service could not be started, or died.
        ConflictError, ServiceError, WaitTimeoutError: as `save_snapshot`.
    """
    if not folder.has_begun:
        raise ConfigError(f"there is no run in {folder.path} to save the buffer of")
    # the lock keeps a `tba run --resume` from starting Redis over the same files
    with folder.acquire(resume=True, fresh=False) as lock_fd:
        return _with_buffer(folder, folder, lock_fd, console, lambda client: save_snapshot(client, name, show=show))


def read_ended(folder: RunFolder, use: Callable[[BufferClient], T]) -> T:
    """Return what `use` reads from the buffer of a run that has ended, over a copy of its Redis files.

    Raises:
        ConfigError: the files are not there, or there is no room for the copy.
        ChildError, WaitTimeoutError: Redis or the buffer service could not be started.
    """
    if not folder.redis_path.is_dir():
        raise ConfigError(f"the buffer of {folder.path.name!r} is gone: {folder.redis_path} does not exist")
    num_bytes = sum(file.stat().st_size for file in folder.redis_path.rglob("*") if file.is_file())
    with tempfile.TemporaryDirectory(prefix="tba-ended-") as place:
        free_bytes = shutil.disk_usage(place).free
        if num_bytes > free_bytes:
            raise ConfigError(
                f"reading {folder.redis_path} needs a copy of its {num_bytes:,} bytes, and {place} has {free_bytes:,} "
                "free; set TMPDIR to a folder with more"
            )
        copy = RunFolder(Path(place) / folder.path.name)
        with copy.acquire(resume=False, fresh=True) as lock_fd:
            shutil.copytree(folder.redis_path, copy.redis_path)
            return _with_buffer(copy, folder, lock_fd, Console("quiet", stream=sys.stderr), use)


def _with_buffer(
    folder: RunFolder, run: RunFolder, lock_fd: int, console: Console, use: Callable[[BufferClient], T]
) -> T:
    """Start Redis and a buffer service in `folder` with the recipe of `run`, use them, stop them."""
    # only this process calls the buffer service, and a run in progress may have the ports of the recipe
    original = load_recipe(run.recipe_path, sets=["buffer.port=0", "reward.port=0"], environ={})
    redis_binary = find_redis_server(original.local.redis_server)
    config, redis_port = with_real_addresses(original, folder)
    folder.make_folders()
    folder.write_json(folder.config_path, config.model_dump(mode="json"))
    services = Services(config, folder, environ=os.environ, redis_binary=redis_binary, redis_port=redis_port)
    token = operator_client_token(config.auth.tokens_file)
    client = BufferClient(config.buffer_url, token=token, retry_s=CALL_RETRY_S, ca_file=config.tls.ca_file)

    def check_loss() -> None:
        with suppress(ServiceError):
            if client.run().loss is not None:
                raise _ReadableError

    async def work(processes: ProcessManager) -> T:
        async with asyncio.timeout(config.local.start_timeout_s):
            await processes.start(services.redis())
            await wait_for_redis(redis_port, folder.redis_password_path)
            await processes.start(services.buffer())
            with suppress(_ReadableError):
                await wait_until_ready(config.buffer_url, config.tls.ca_file, check=check_loss)
        return await asyncio.to_thread(use, client)

    try:
        return asyncio.run(run_with_processes(work, folder, console, lock_fd, config.local.stop_timeout_s))
    except TimeoutError as error:
        if isinstance(error, TbaError):
            raise
        name = "buffer" if folder.log_path("buffer").exists() else "redis"
        raise WaitTimeoutError(  # quotes the log: the folder of a copy is deleted
            f"Redis and the buffer were not ready within {config.local.start_timeout_s:.0f} s "
            f"(local.start_timeout_s); the log of the {name} ends with: {folder.end_of_log(name)}"
        ) from None
    finally:
        client.close()
