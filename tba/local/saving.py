"""Saving the buffer of a run: of one that is going through its buffer service, of one that has ended by starting its
Redis and its buffer service for as long as it takes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from tba.api import SnapshotInfo
from tba.clients import BufferClient
from tba.config import load_recipe
from tba.errors import ConfigError, ServiceError, TbaError, WaitTimeoutError
from tba.local.console import Console
from tba.local.crew import Crew, with_crew
from tba.local.readiness import wait_until_ready
from tba.local.redis_server import find_redis_server, wait_for_redis
from tba.local.resolve import with_real_addresses
from tba.local.run_folder import RunFolder
from tba.local.services import Services
from tba.tokens import operator_client_token

POLL_S = 0.3
SILENCE_S = 300.0
CALL_RETRY_S = 5.0


def save(client: BufferClient, name: str, *, show: Callable[[SnapshotInfo], None]) -> SnapshotInfo:
    """Save the buffer of a run that is going, and wait for it; `show` sees how far it is.

    Raises:
        ConflictError: a snapshot of this name exists, or the buffer saves or loads another one.
        ServiceError: it failed; says why.
        WaitTimeoutError: nothing was written for SILENCE_S.
    """
    info, moved_s = client.save_snapshot(name), time.monotonic()
    while info.state == "saving":
        time.sleep(POLL_S)
        before, info = info, client.get_snapshot(name)
        if info != before:
            moved_s = time.monotonic()
            show(info)
        elif time.monotonic() - moved_s > SILENCE_S:
            raise WaitTimeoutError(f"wait 'snapshot-save': nothing was written for {SILENCE_S:.0f} s, see `tba status`")
    if info.state == "failed":
        raise ServiceError(f"snapshot {info.source} was not saved: {info.reason}")
    return info


def save_ended(folder: RunFolder, name: str, *, console: Console, show: Callable[[SnapshotInfo], None]) -> SnapshotInfo:
    """The same for a run that has ended; its folder is locked meanwhile.

    Raises:
        ConfigError: no run began in this folder, or it is going.
        ChildError: Redis or the buffer service could not be started, or died.
        ConflictError, ServiceError, WaitTimeoutError: as `save`.
    """
    if not folder.has_begun:
        raise ConfigError(f"there is no run in {folder.path} to save the buffer of")
    original = load_recipe(folder.recipe_path, environ={})
    redis_binary = find_redis_server(original.local.redis_server)
    with folder.acquire(resume=True, fresh=False) as lock_fd:
        config, redis_port = with_real_addresses(original, folder)
        folder.make_folders()
        folder.write_json(folder.config_path, config.model_dump(mode="json"))
        services = Services(config, folder, environ=os.environ, redis_binary=redis_binary, redis_port=redis_port)
        token = operator_client_token(config.auth.tokens_file)
        client = BufferClient(config.buffer_url, token=token, retry_s=CALL_RETRY_S, ca_file=config.tls.ca_file)

        async def work(crew: Crew) -> SnapshotInfo:
            async with asyncio.timeout(config.local.start_timeout_s):
                await crew.start(services.redis())
                await wait_for_redis(redis_port)
                await crew.start(services.buffer())
                await wait_until_ready(config.buffer_url, config.tls.ca_file)
            return await asyncio.to_thread(save, client, name, show=show)

        try:
            return asyncio.run(with_crew(work, folder, console, lock_fd, config.local.stop_timeout_s))
        except TimeoutError as error:
            if isinstance(error, TbaError):
                raise
            raise WaitTimeoutError(
                f"Redis and the buffer were not ready within {config.local.start_timeout_s:.0f} s "
                f"(local.start_timeout_s); see {folder.logs_path}"
            ) from None
        finally:
            client.close()
