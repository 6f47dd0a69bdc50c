"""The steps of `tba setup`, in their order. Each finds out what is there and does what is missing, so that a second run
changes nothing.

    store     wait until it can be written; make the bucket
    folders   models and data sets: make, fetch, push          needs no service, and the reward service may wait for it
    prompts   wait for buffer and reward service; check that every prompt is scored; upload
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from tba.clients import BufferClient, RewardClient
from tba.config import Recipe
from tba.errors import ConfigError
from tba.folders import Shelf
from tba.local.prompts import prompts_of
from tba.setup.folders import set_folders_up
from tba.setup.services import set_prompts_up
from tba.store import open_store
from tba.store.waiting import wait_for_store
from tba.tokens import client_token

Part = Literal["models", "prompts"]
PARTS: tuple[Part, ...] = get_args(Part)
CALL_RETRY_S = 5.0
CALL_TIMEOUT_S = 30.0
STORE_TIMEOUT_S = 5.0
"""Deadline of one operation while the store is waited for."""


def run_setup(
    recipe: Recipe,
    *,
    wait_s: float,
    create_bucket: bool,
    prepare: bool,
    pull: bool,
    only: Part | None,
    say: Callable[[str], None],
) -> None:
    """Bring everything up that a run needs; what is there is left as it is.

    Args:
        wait_s: deadline of the wait for the store, and of that for the services.
        create_bucket: make the bucket where there is none.
        prepare, pull: see `set_folders_up`.
        only: one part alone.

    Raises:
        TbaError: something cannot be had, in a sentence that says what to do.
    """
    if only != "models":
        _check_addresses(recipe)
    _set_store_up(recipe, wait_s=wait_s, create_bucket=create_bucket, say=say)
    shelf = Shelf(open_store(recipe.store), say)
    if only != "prompts":
        set_folders_up(recipe, shelf, prepare=prepare, pull=pull, say=say)
    if only == "models":
        return
    prompts = prompts_of(recipe)
    how: dict[str, Any] = {
        "token": client_token(recipe.auth.tokens_file, "operator"),
        "ca_file": recipe.tls.ca_file,
        "retry_s": CALL_RETRY_S,
        "timeout_s": CALL_TIMEOUT_S,
    }
    buffer, reward = BufferClient(recipe.buffer_url, **how), RewardClient(recipe.reward_url, **how)
    try:
        set_prompts_up(recipe, prompts, buffer=buffer, reward=reward, wait_s=wait_s, say=say)
        info = buffer.run()
        say(f"run {info.run!r} is {info.state} at step {info.step}; everything is there")
    finally:
        buffer.close()
        reward.close()


def _set_store_up(recipe: Recipe, *, wait_s: float, create_bucket: bool, say: Callable[[str], None]) -> None:
    timeout_s = min(recipe.store.timeout_s, STORE_TIMEOUT_S)
    store = open_store(recipe.store.model_copy(update={"timeout_s": timeout_s}))
    wait_for_store(store, wait_s=wait_s, say=say, create_bucket=create_bucket)
    say(f"the store {store.url} takes create-only writes")


def _check_addresses(recipe: Recipe) -> None:
    for name, section in (("buffer", recipe.buffer), ("reward", recipe.reward)):
        if section.url is None and section.port == 0:
            raise ConfigError(
                f"{name}.port is 0 and {name}.url is not given, so nobody knows where the {name} service is; give "
                f"{name}.url (TBA_{name.upper()}__URL), or use `tba run`, which sets everything up itself"
            )
