"""Save, read or show the buffer of a run that has ended; its Redis and a buffer service are started for that time.

To read or show it, both are started over a copy of the files, so that nothing in the run folder changes. The buffer is
read-only then (`buffer.read_only`).
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tba.api import SnapshotInfo
from tba.clients import BufferClient
from tba.config import Recipe, load_recipe, parse_recipe
from tba.config.sections import StoreSection
from tba.errors import ConfigError, ServiceError, TbaError, WaitTimeoutError
from tba.temporary_folders import temporary_folder
from tba.tokens import operator_client_token, operator_token
from tba_cli.child_processes import interrupt_on_signals
from tba_cli.console import Console
from tba_cli.local.processes import ProcessManager, run_with_processes
from tba_cli.local.services import process_spec, wait_until_ready
from tba_cli.redis_server import ask_redis, find_redis_server, shut_off_acting_commands, wait_for_redis
from tba_cli.reports.history import load_end
from tba_cli.resolve import absolute_store_url, with_real_addresses
from tba_cli.run_folder import RunFolder, num_plain_bytes
from tba_cli.run_target import Page, page_url, save_snapshot

T = TypeVar("T")
CALL_RETRY_S = 5.0
LOOPBACK = "127.0.0.1"


def save_ended(folder: RunFolder, name: str) -> SnapshotInfo:
    """Save the buffer of a run that has ended as the snapshot `name`; lock the run folder meanwhile.

    Raises:
        ChildError: Redis or the buffer service could not be started, or died.
        ConflictError, ServiceError, WaitTimeoutError: as `save_snapshot`.
    """
    if not folder.has_begun:
        raise ConfigError(f"there is no run in {folder.path} to save the buffer of")
    console = Console("normal", stream=sys.stderr)
    # the lock keeps a `tba run --resume` from starting Redis over the same files
    with folder.acquire(resume=True, fresh=False) as lock_fd:
        # a run in progress may have the ports of the recipe
        recipe = load_recipe(folder.recipe_path, sets=["buffer.port=0", "reward.port=0"], environ={})
        return asyncio.run(
            _with_buffer(recipe, folder, lock_fd, console, lambda client, _: save_snapshot(client, name))
        )


def read_ended(folder: RunFolder, use: Callable[[BufferClient], T]) -> T:
    """Start a read-only buffer over a copy of an ended run's files, and return what `use` returns for its client.

    Raises:
        ChildError, WaitTimeoutError: Redis or the buffer service could not be started.
    """
    recipe, console = _read_only_recipe(folder), Console("quiet", stream=sys.stderr)
    with _copy_of(folder, recipe.run.name) as (copy, lock_fd):
        return asyncio.run(_with_buffer(recipe, copy, lock_fd, console, lambda client, _: use(client)))


def serve_ended(folder: RunFolder, *, port: int, show: Callable[[Page], None]) -> None:
    """Serve the web page of an ended run until Ctrl-C or SIGTERM.

    Args:
        port: port of the page on loopback; 0: a free one.
        show: called once the page can be opened.

    Raises:
        ChildError, WaitTimeoutError: as `read_ended`, or a process died later.
        KeyboardInterrupt: a signal came before the page could be opened.
    """
    recipe, console = _read_only_recipe(folder, port=port), Console("quiet", stream=sys.stderr)
    is_shown = threading.Event()

    def show_page(_: BufferClient, config: Recipe) -> None:
        tokens_file = config.auth.tokens_file
        assert tokens_file is not None, "a copy has tokens of its own"
        show(Page(page_url(config.buffer_url, operator_token(tokens_file)), tokens_file))
        is_shown.set()
        print("read-only, from a copy of the files of the run; Ctrl-C ends it", file=sys.stderr)

    with interrupt_on_signals(), _copy_of(folder, recipe.run.name) as (copy, lock_fd):
        try:
            asyncio.run(_with_buffer(recipe, copy, lock_fd, console, show_page, stays=True))
        except KeyboardInterrupt:
            if not is_shown.is_set():
                raise


def _read_only_recipe(folder: RunFolder, *, port: int = 0) -> Recipe:
    """Return the recipe of the read-only buffer: on loopback, with tokens of its own, over the run's store.

    The run folder may come from another person. So the settings of its recipe that make tba start, import, read or call
    anything are left out. The Redis, the addresses, the tokens and the certificates are the reader's own.
    """
    if not folder.redis_path.is_dir():
        raise ConfigError(f"the buffer of {folder.path.name!r} is gone: {folder.redis_path} does not exist")
    end, recipe = load_end(folder), load_recipe(folder.recipe_path, environ={})
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.at_s))
    document = recipe.model_dump(mode="json")
    why = f"this run is over since {at}: {end.reason}"
    document["buffer"] |= {"host": LOOPBACK, "port": port, "read_only": why[:1000]}
    # a run in progress may have its port
    document["reward"] |= {"host": LOOPBACK, "port": 0}
    document["local"] = {name: document["local"][name] for name in ("start_timeout_s", "stop_timeout_s")}
    # requests to an endpoint that the folder names would be signed with the keys of the reader
    store = StoreSection() if recipe.store.endpoint_url else recipe.store
    own = {"url": absolute_store_url(store.url, folder), "region": store.region}
    document |= {"auth": {}, "tls": {}, "scaling": {}, "store": own}
    return parse_recipe(document, where=str(folder.recipe_path))


@contextmanager
def _copy_of(folder: RunFolder, name: str) -> Iterator[tuple[RunFolder, int]]:
    """Yield a temporary run folder `name` with a copy of the Redis files, and its lock's descriptor; then delete it."""
    num_bytes = num_plain_bytes(folder.redis_path)
    with temporary_folder("tba-ended-") as place:
        free_bytes = shutil.disk_usage(place).free
        if num_bytes > free_bytes:
            raise ConfigError(
                f"a copy of {folder.redis_path} needs {num_bytes:,} bytes, and {place} has {free_bytes:,} free; set "
                "TMPDIR to a folder with more"
            )
        copy = RunFolder(place / name)
        with copy.acquire(resume=False, fresh=True) as lock_fd:
            _copy_redis_files(folder, copy.redis_path)
            yield copy, lock_fd


def _copy_redis_files(folder: RunFolder, to: Path) -> None:
    """Copy the Redis files of an ended run consistently, without its lock, so that a resume need not wait.

    Raises:
        OSError: the files cannot be read, or the copy cannot be written.
    """
    # in this order: from here on every start changes the time
    locked_at_ns = folder.locked_at_ns
    try:
        if not folder.is_in_use:
            shutil.copytree(folder.redis_path, to, symlinks=True)
            # again: what was counted before may have been replaced by a link meanwhile
            num_plain_bytes(to)
    except OSError:
        # a Redis that starts renames and deletes files
        if not folder.is_in_use and folder.locked_at_ns == locked_at_ns:
            raise
    if folder.is_in_use or folder.locked_at_ns != locked_at_ns:
        raise ConfigError(f"run {folder.path.name!r} was just started again; repeat this command")


async def _with_buffer(
    recipe: Recipe,
    folder: RunFolder,
    lock_fd: int,
    console: Console,
    use: Callable[[BufferClient, Recipe], T],
    *,
    stays: bool = False,
) -> T:
    """Start Redis and a buffer service in `folder`, call `use` with their client and recipe, then stop them.

    Args:
        stays: keep them running after `use`, until a signal or the death of a child.
    """
    redis_binary = find_redis_server()
    config = with_real_addresses(recipe, folder)
    is_copy = recipe.buffer.read_only is not None
    folder.make_folders()
    script = shut_off_acting_commands(redis_binary, folder.redis_conf_path) if is_copy else None
    folder.write_json(folder.config_path, config.model_dump(mode="json"))
    token = operator_client_token(config.auth.tokens_file)
    client = BufferClient(config.buffer_url, token=token, retry_s=CALL_RETRY_S, ca_file=config.tls.ca_file)

    def is_readable() -> bool:
        """Return whether the buffer reports an unaccepted loss of Redis: it is never ready then, but answers reads."""
        try:
            return client.run().loss is not None
        except ServiceError:
            return False

    async def work(processes: ProcessManager) -> T:
        async with asyncio.timeout(config.local.start_timeout_s):
            await processes.start(process_spec(config, folder, "redis"))
            await wait_for_redis(folder.redis_socket_path, folder.redis_password_path)
            if script is not None:
                from tba_buffer.storage.lost_changes import READ  # the one script that a view runs

                await ask_redis(folder.redis_socket_path, folder.redis_password_path, script, "LOAD", READ)
            await processes.start(process_spec(config, folder, "buffer"))
            await wait_until_ready(config.buffer_url, config.tls.ca_file, is_enough=is_readable)
        result = await asyncio.to_thread(use, client, config)
        if stays:
            await asyncio.Event().wait()
        return result

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
