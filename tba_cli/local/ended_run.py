"""Save, read or show the buffer of a run that has ended: start its Redis and a buffer service for as long as it takes.

To read and to show, both are started over a copy of the files, so that nothing in the run folder changes, and the
buffer is read-only (`buffer.read_only`). For a snapshot they start over no files, and the buffer loads it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tba.api import SnapshotInfo
from tba.clients import BufferClient
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, ServiceError, TbaError, WaitTimeoutError
from tba.temporary_folders import temporary_folder
from tba.tokens import operator_client_token, operator_token
from tba_cli.child_processes import interrupt_on_signals
from tba_cli.console import Console
from tba_cli.local.processes import ProcessManager, run_with_processes
from tba_cli.local.services import Services, wait_until_ready
from tba_cli.local.views import View, ended_view
from tba_cli.redis_server import ask_redis, find_redis_server, shut_off_acting_commands, wait_for_redis
from tba_cli.resolve import with_real_addresses
from tba_cli.run_folder import RunFolder, num_plain_bytes
from tba_cli.run_target import Page, page_url, save_snapshot
from tba_cli.setup.origin import until_loaded

T = TypeVar("T")
CALL_RETRY_S = 5.0
MAX_COPIES = 3
LARGE_BYTES = 10**9
"""A copy of more is announced: it takes a while, and this much of the disk."""


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
        # a run in progress may have the ports of the recipe
        recipe = load_recipe(folder.recipe_path, sets=["buffer.port=0", "reward.port=0"], environ={})

        async def save(client: BufferClient, _: Recipe) -> SnapshotInfo:
            return await asyncio.to_thread(save_snapshot, client, name, show=show)

        return asyncio.run(_with_buffer(recipe, folder, lock_fd, console, save))


def read_ended(folder: RunFolder, use: Callable[[BufferClient], T]) -> T:
    """Return what `use` reads from the buffer of a run that is over; raises as `ended_view` and `read_view`."""
    return read_view(ended_view(folder), use)


def read_view(view: View, use: Callable[[BufferClient], T]) -> T:
    """Return what `use` reads from a read-only buffer.

    Raises:
        ConfigError: there is no room for the files, they changed meanwhile, or the snapshot is damaged.
        ChildError, WaitTimeoutError: Redis or the buffer service could not be started.
    """

    async def read(client: BufferClient, config: Recipe) -> T:
        await _load(view, client, config)
        return await asyncio.to_thread(use, client)

    with _copy_of(view) as (copy, lock_fd):
        return asyncio.run(_with_buffer(view.recipe, copy, lock_fd, _quiet(), read))


def serve_view(view: View, *, port: int, show: Callable[[Page], None]) -> None:
    """Serve the page of a view until Ctrl-C or SIGTERM.

    Args:
        port: of the page on loopback; 0: a free one.
        show: called once the page is there.

    Raises:
        ConfigError: as `read_view`, or the port is in use.
        ChildError, WaitTimeoutError: as `read_view`, or a process died later.
        KeyboardInterrupt: a signal came before the page was there.
    """
    is_shown = False

    async def use(client: BufferClient, config: Recipe) -> None:
        nonlocal is_shown
        await _load(view, client, config)
        tokens_file = config.auth.tokens_file
        assert tokens_file is not None, "a copy has tokens of its own"
        show(Page(page_url(config.buffer_url, operator_token(tokens_file)), tokens_file))
        is_shown = True
        print("read-only, from a copy of the files of the run; Ctrl-C ends it", file=sys.stderr)
        # until a signal or the death of a child cancels it
        await asyncio.Event().wait()

    with interrupt_on_signals(), _copy_of(view) as (copy, lock_fd):
        try:
            asyncio.run(_with_buffer(view.at_port(port), copy, lock_fd, _quiet(), use))
        except KeyboardInterrupt:
            if not is_shown:
                raise


async def _load(view: View, client: BufferClient, config: Recipe) -> None:
    """Wait until a buffer that shows a snapshot has loaded it."""
    if view.files is not None:
        return
    try:
        console = Console("normal", stream=sys.stderr)
        await until_loaded(client, console, silence_s=config.local.start_timeout_s)
    except ConfigError as error:
        raise ConfigError(f"{error}; {view.others}") from None


@contextmanager
def _copy_of(view: View) -> Iterator[tuple[RunFolder, int]]:
    """Yield a new run folder with a copy of the files, if there are any, and its lock; it is deleted at the end."""
    with temporary_folder("tba-ended-") as place:
        free_bytes = shutil.disk_usage(place).free
        what = f"a copy of {view.recipe.run.snapshot if view.files is None else view.files.redis_path}"
        if view.num_bytes > free_bytes:
            raise ConfigError(
                f"{what} needs {view.num_bytes:,} bytes, and {place} has {free_bytes:,} free; set TMPDIR to a folder "
                "with more"
            )
        if view.num_bytes > LARGE_BYTES:
            print(f"making {what}, {view.num_bytes / 1e9:.1f} GB, in {place}", file=sys.stderr, flush=True)
        copy = RunFolder(place / view.name)
        with copy.acquire(resume=False, fresh=True) as lock_fd:
            if view.files is not None:
                _copy_redis_files(view.files, copy.redis_path)
            yield copy, lock_fd


def _copy_redis_files(folder: RunFolder, to: Path) -> None:
    """Copy the Redis files of a run that is over as one moment left them, without its lock: a resume need not wait.

    Raises:
        ConfigError: the run was started again meanwhile.
        OSError: the files cannot be read, or the copy cannot be written.
    """
    for _ in range(MAX_COPIES):
        # in this order: from here on every start changes the time
        locked_at_ns = folder.locked_at_ns
        _check_over(folder)
        try:
            shutil.copytree(folder.redis_path, to, symlinks=True)
            # again: what was counted before may have been replaced by a link meanwhile
            num_plain_bytes(to)
        except OSError:
            # a Redis that starts renames and deletes files
            if not folder.is_in_use and folder.locked_at_ns == locked_at_ns:
                raise
        _check_over(folder)
        if folder.locked_at_ns == locked_at_ns:
            return
        shutil.rmtree(to, ignore_errors=True)
    raise ConfigError(f"run {folder.path.name!r} is started again and again; repeat this command when it is over")


def _check_over(folder: RunFolder) -> None:
    if folder.is_in_use:
        raise ConfigError(f"run {folder.path.name!r} was just started again; repeat this command to see it in progress")


def _quiet() -> Console:
    return Console("quiet", stream=sys.stderr)


async def _with_buffer(
    recipe: Recipe,
    folder: RunFolder,
    lock_fd: int,
    console: Console,
    use: Callable[[BufferClient, Recipe], Awaitable[T]],
) -> T:
    """Start Redis and a buffer service in `folder`, use them with the recipe that they have, stop them."""
    redis_binary = find_redis_server(recipe.local.redis_server)
    config = with_real_addresses(recipe, folder)
    is_copy = recipe.buffer.read_only is not None and folder.redis_path.is_dir()
    folder.make_folders()
    script = shut_off_acting_commands(redis_binary, folder.redis_conf_path) if is_copy else None
    folder.write_json(folder.config_path, config.model_dump(mode="json"))
    services = Services(config, folder, environ=os.environ, redis_binary=redis_binary)
    token = operator_client_token(config.auth.tokens_file)
    client = BufferClient(config.buffer_url, token=token, retry_s=CALL_RETRY_S, ca_file=config.tls.ca_file)

    def check_loss() -> None:
        with suppress(ServiceError):
            if client.run().loss is not None:
                raise _ReadableError

    async def work(processes: ProcessManager) -> T:
        async with asyncio.timeout(config.local.start_timeout_s):
            await processes.start(services.spec("redis"))
            await wait_for_redis(folder.redis_socket_path, folder.redis_password_path)
            if script is not None:
                from tba_buffer.storage.losses import READ  # the one script that a view runs

                await ask_redis(folder.redis_socket_path, folder.redis_password_path, script, "LOAD", READ)
            await processes.start(services.spec("buffer"))
            with suppress(_ReadableError):
                await wait_until_ready(config.buffer_url, config.tls.ca_file, check=check_loss)
        return await use(client, config)

    try:
        return await run_with_processes(work, folder, console, lock_fd, config.local.stop_timeout_s)
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
