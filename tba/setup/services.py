"""Waits for the services that the prompts go to, and the prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tba.api import Prompt
from tba.clients import BufferClient, RewardClient
from tba.clients.http import ServiceClient
from tba.config import Recipe
from tba.errors import UnavailableError, WaitTimeoutError
from tba.local.console import Console
from tba.local.origin import until_loaded
from tba.local.prompts import upload_prompts
from tba.local.scored_tasks import check_tasks

POLL_S = 1.0
SAY_EVERY_S = 30.0
READY_TIMEOUT_S = 5.0
"""Deadline of one question whether a service is ready."""
Say = Callable[[str], None]


def wait_for_service(url: str, *, ca_file: str | None, wait: str, deadline_s: float, say: Say) -> None:
    """Wait until a service answers that it is ready.

    Args:
        url: its base URL; no token is sent.
        ca_file: authorities that are trusted for https.
        wait: name of the wait.
        deadline_s: on the monotonic clock.

    Raises:
        WaitTimeoutError: it was not ready in time.
    """
    client = ServiceClient(url, retry_s=0, timeout_s=READY_TIMEOUT_S, ca_file=ca_file)
    try:
        _poll_until_ready(client, wait=wait, deadline_s=deadline_s, say=say)
    finally:
        client.close()


def _poll_until_ready(client: ServiceClient, *, wait: str, deadline_s: float, say: Say) -> None:
    begun_s, said_s = time.monotonic(), -SAY_EVERY_S
    while True:
        try:
            reason = client.not_ready()
        except UnavailableError as error:
            reason = str(error)
        if reason is None:
            return
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise WaitTimeoutError(
                f"wait {wait!r}: {client.base_url} was not ready within {now_s - begun_s:.0f} s: {reason}"
            )
        if now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            say(f"wait {wait!r} ({deadline_s - now_s:.0f} s left): {reason}")
        time.sleep(POLL_S)


def set_prompts_up(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    *,
    buffer: BufferClient,
    reward: RewardClient,
    wait_s: float,
    say: Say,
) -> None:
    """Wait for buffer and reward service, check that every prompt can be scored, then upload the prompts.

    Raises:
        ConfigError: a task is not scored, or the snapshot that the run begins with cannot be loaded.
        WaitTimeoutError: a service was not ready within `wait_s`.
        ServiceError: a service refuses, for example the token.
    """
    deadline_s, ca_file = time.monotonic() + wait_s, recipe.tls.ca_file
    wait_for_service(recipe.buffer_url, ca_file=ca_file, wait="buffer-start", deadline_s=deadline_s, say=say)
    if recipe.run.snapshot is not None:
        origin = asyncio.run(until_loaded(buffer, Console("normal"), silence_s=recipe.local.start_timeout_s))
        say(f"begun with {origin.num_rollouts} rollouts of {origin.source}")
    wait_for_service(recipe.reward_url, ca_file=ca_file, wait="reward-start", deadline_s=deadline_s, say=say)
    check_tasks(prompts, (info.task for info in reward.rewards()))
    reply = upload_prompts(buffer, prompts, max_chunk_bytes=recipe.buffer.max_body_bytes // 2)
    say(
        f"prompts: {reply.num_new} new and {reply.num_same} known; the run has {reply.num_train} to train on and "
        f"{reply.num_heldout} held out"
    )
