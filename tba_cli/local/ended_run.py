"""Save, read or show the buffer of a run that has ended: start its Redis and a buffer service for as long as it takes.

To read and to show, both are started over a copy of the files, so that nothing in the run folder changes, and the
buffer is read-only (`buffer.read_only`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

from tba.api import SnapshotInfo
from tba.clients import BufferClient
from tba.config import Recipe, load_recipe, parse_recipe
from tba.errors import ConfigError, ServiceError, TbaError, WaitTimeoutError
from tba.tokens import operator_client_token, operator_token
from tba_cli.console import Console
from tba_cli.local.processes import ProcessManager, run_with_processes
from tba_cli.local.services import Services, wait_until_ready
from tba_cli.redis_server import find_redis_server, wait_for_redis
from tba_cli.reports.history import load_end
from tba_cli.resolve import absolute_store_url, with_real_addresses
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import page_url, save_snapshot

T = TypeVar("T")
CALL_RETRY_S = 5.0
LOOPBACK = "127.0.0.1"
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
    """Return what `use` reads from the buffer of a run that has ended, over a copy of its Redis files.

    Raises:
        ConfigError: the files are not there, or there is no room for the copy.
        ChildError, WaitTimeoutError: Redis or the buffer service could not be started.
    """

    async def read(client: BufferClient, _: Recipe) -> T:
        return await asyncio.to_thread(use, client)

    with _copy_of(folder) as (copy, lock_fd):
        return asyncio.run(_with_buffer(_view_recipe(folder), copy, lock_fd, _quiet(), read))


def serve_ended(folders: Sequence[RunFolder], *, port: int, show: Callable[[list[str]], None]) -> None:
    """Serve the page of each run that has ended until Ctrl-C or SIGTERM, each over a copy of its Redis files.

    Args:
        port: of the first page on loopback, and one more for each further one; 0: free ones.
        show: called once, with the addresses of all pages.

    Raises:
        ConfigError: as `read_ended`, or a port is in use.
        ChildError, WaitTimeoutError: as `read_ended`, or a process died later.
        KeyboardInterrupt: a signal came before the pages were there.
    """
    urls: dict[int, str] = {}

    async def serve(number: int, copy: RunFolder, lock_fd: int) -> None:
        async def use(_: BufferClient, config: Recipe) -> None:
            assert config.auth.tokens_file is not None, "a copy has tokens of its own"
            urls[number] = page_url(config.buffer_url, operator_token(config.auth.tokens_file))
            if len(urls) == len(folders):
                show([urls[each] for each in sorted(urls)])
            # until a signal or the death of a child cancels it
            await asyncio.Event().wait()

        recipe = _view_recipe(folders[number], port=port and port + number)
        await _with_buffer(recipe, copy, lock_fd, _quiet(), use)

    async def serve_all(copies: Sequence[tuple[RunFolder, int]]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, (copy, lock_fd) in enumerate(copies):
                    group.create_task(serve(number, copy, lock_fd))
        except ExceptionGroup as errors:
            # the others were only cancelled
            raise errors.exceptions[0] from None

    with _interrupt_on_signals(), ExitStack() as stack:
        try:
            asyncio.run(serve_all([stack.enter_context(_copy_of(folder)) for folder in folders]))
        except KeyboardInterrupt:
            if len(urls) < len(folders):
                raise


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Let the signals that end a process end it as Ctrl-C does: processes are stopped, and copies are deleted."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    # a shell starts background commands with SIGINT ignored; `nohup` has SIGHUP ignored, which stays so
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: interrupt}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _copy_of(folder: RunFolder) -> Iterator[tuple[RunFolder, int]]:
    """Yield a new run folder with a copy of the Redis files, and its lock; it is deleted at the end."""
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
        if num_bytes > LARGE_BYTES:
            print(f"copying {folder.redis_path}, {num_bytes / 1e9:.1f} GB, to {place}", file=sys.stderr, flush=True)
        copy = RunFolder(Path(place) / folder.path.name)
        with copy.acquire(resume=False, fresh=True) as lock_fd:
            shutil.copytree(folder.redis_path, copy.redis_path)
            yield copy, lock_fd


def _view_recipe(run: RunFolder, *, port: int = 0) -> Recipe:
    """Return the recipe of a read-only buffer of the run: on loopback, with tokens of its own, over the run's store."""
    end = load_end(run)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.at_s))
    document = load_recipe(run.recipe_path, sets=["reward.port=0"], environ={}).model_dump(mode="json")
    why = f"this run is over since {since}: {end.reason}"
    document["buffer"] |= {"host": LOOPBACK, "port": port, "read_only": why[:1000]}
    document["auth"]["tokens_file"] = None
    # the certificate is for another name than that of loopback
    document["tls"] |= {"cert_file": None, "key_file": None}
    document["store"]["url"] = absolute_store_url(document["store"]["url"], run)
    return parse_recipe(document, where=str(run.recipe_path))


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
    config, redis_port = with_real_addresses(recipe, folder)
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
