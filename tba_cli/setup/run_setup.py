"""The steps of `tba setup`, in their order. Each does only what is missing, so a second run changes nothing.

store     wait until it can be written; make the bucket
folders   models and data sets: make, fetch, push          before any service: the reward service may wait for them
prompts   wait for buffer and reward service; check that every prompt is scored; upload
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal

from tba.clients import BufferClient, RewardClient
from tba.clients.service_client import ServiceClient
from tba.config import Recipe
from tba.errors import ConfigError, UnavailableError, WaitTimeoutError
from tba.store import open_store
from tba.store.open import wait_for_store
from tba.tokens import client_token
from tba.weights import check_redis_is_newest
from tba_cli.artifacts import ArtifactStore
from tba_cli.console import Console
from tba_cli.prompts.reader import check_tasks, prompt_warnings, prompts_of, upload_prompts
from tba_cli.setup.artifacts import set_up_folders
from tba_cli.setup.origin import until_loaded

POLL_S = 1.0
PROGRESS_INTERVAL_S = 30.0
READY_TIMEOUT_S = 5.0
CALL_RETRY_S = 5.0
CALL_TIMEOUT_S = 30.0
STORE_TIMEOUT_S = 5.0
"""Deadline of one operation while the store is waited for."""
OnProgress = Callable[[str], None]


def run_setup(
    recipe: Recipe,
    *,
    wait_s: float,
    create_bucket: bool,
    prepare: bool,
    pull: bool,
    only: Literal["models", "prompts"] | None,
    on_progress: OnProgress,
) -> None:
    """Set up whatever a run needs and lacks; change nothing that exists.

    Args:
        wait_s: deadline of the wait for the store, and of the wait for the services.
        prepare, pull: see `set_up_folders`.
        only: do only this part; None: all parts.

    Raises:
        WaitTimeoutError: the store or a service was not ready within `wait_s`.
        TbaError: something else cannot be had; the message says what to do.
        OlderRedisError: the store holds more of the run than Redis knows.
    """
    # before the store is waited for: an address that is missing stays so
    for name, section in (("buffer", recipe.buffer), ("reward", recipe.reward)):
        if only != "models" and section.url is None and section.port == 0:
            raise ConfigError(
                f"{name}.port is 0 and {name}.url is not given, so the address of the {name} service is unknown; give "
                f"{name}.url (TBA_{name.upper()}__URL), or use `tba run`, which sets everything up itself"
            )
    short = open_store(recipe.store, timeout_s=STORE_TIMEOUT_S)  # because the wait tries again
    wait_for_store(short, wait_s=wait_s, on_progress=on_progress, create_bucket=create_bucket)
    on_progress(f"the store {short.url} supports create-only writes")
    store = open_store(recipe.store)
    if only != "prompts":
        artifacts = ArtifactStore(store, on_progress)
        set_up_folders(recipe, artifacts, prepare=prepare, pull=pull)
    if only == "models":
        return
    # after the folders, since the data sets of the prompts are among them
    prompts = prompts_of(recipe)
    for warning in prompt_warnings(recipe, prompts):
        on_progress(f"warning: {warning}")
    options: dict[str, Any] = {
        "token": client_token(recipe.auth.tokens_file, "operator"),
        "ca_file": recipe.tls.ca_file,
        "retry_s": CALL_RETRY_S,
        "timeout_s": CALL_TIMEOUT_S,
    }
    buffer, reward = BufferClient(recipe.buffer_url, **options), RewardClient(recipe.reward_url, **options)
    deadline_s = time.monotonic() + wait_s
    with closing(buffer), closing(reward):
        _wait_until_ready(buffer, "buffer-start", deadline_s, on_progress)
        if recipe.run.snapshot is not None:
            origin = asyncio.run(until_loaded(buffer, Console("normal"), silence_s=recipe.local.start_timeout_s))
            on_progress(f"begun with {origin.num_rollouts} rollouts of {origin.source}")
        _wait_until_ready(reward, "reward-start", deadline_s, on_progress)
        check_tasks(prompts, sorted({*(info.task for info in reward.rewards()), *recipe.paid_by_environment}))
        reply = upload_prompts(buffer, prompts, max_chunk_bytes=recipe.buffer.max_body_bytes // 2)
        on_progress(
            f"prompts: {reply.num_new} new and {reply.num_same} known; the run has {reply.num_train} to train on and "
            f"{reply.num_heldout} held out"
        )
        check_redis_is_newest(store, recipe.run.name, buffer.run)
        info = buffer.run()
    on_progress(f"run {info.run!r} is {info.state} at step {info.step}; everything is there")


def _wait_until_ready(client: ServiceClient, wait: str, deadline_s: float, on_progress: OnProgress) -> None:
    begun_s, shown_s = time.monotonic(), -PROGRESS_INTERVAL_S
    while True:
        try:
            reason = client.not_ready(timeout_s=min(READY_TIMEOUT_S, max(deadline_s - time.monotonic(), 0.5)))
        except UnavailableError as error:
            reason = error
        if reason is None:
            return
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise WaitTimeoutError(
                f"wait {wait!r}: {client.base_url} was not ready within {now_s - begun_s:.0f} s: {reason}"
            )
        if now_s - shown_s > PROGRESS_INTERVAL_S:
            shown_s = now_s
            on_progress(f"wait {wait!r} ({deadline_s - now_s:.0f} s left): {reason}")
        time.sleep(POLL_S)
