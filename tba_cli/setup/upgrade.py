"""Check whether a run could continue with another recipe; an upgrade asks this before it changes anything."""

from __future__ import annotations

from collections.abc import Callable

from tba.api import RunInfo
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import BadReplyError, ConfigError, StoreError, UnavailableError
from tba.store import open_store
from tba.tokens import client_token
from tba.versions import PolicyVersion
from tba.weights import WeightVersions

CALL_TIMEOUT_S = 10.0


def check_against_run(recipe: Recipe, *, wait_s: float, on_progress: Callable[[str], None]) -> None:
    """Compare a recipe with the run that its buffer service has now; change nothing.

    A buffer that does not answer is not an error: it has no run that an upgrade could hurt, or it needs the upgrade.

    Args:
        wait_s: how long a buffer that does not answer is asked again.

    Raises:
        ConfigError: the run could not continue with this recipe.
        ServiceError: the buffer refuses the question, for example the token.
    """
    token = client_token(recipe.auth.tokens_file, "viewer")
    buffer = BufferClient(
        recipe.buffer_url, token=token, ca_file=recipe.tls.ca_file, retry_s=wait_s, timeout_s=CALL_TIMEOUT_S
    )
    try:
        info = buffer.run()
    except (UnavailableError, BadReplyError) as error:  # a bad reply: a buffer of another release
        on_progress(f"nothing to compare with: {error}")
        return
    finally:
        buffer.close()
    is_another = info.state == "failed" and info.run != recipe.run.name
    if not _has_begun(info) or info.state == "done" or is_another:
        on_progress(
            f"run {info.run!r} is {info.state} at step {info.step}: no training is in progress, so this recipe is safe"
        )
        return
    _compare(recipe, info)
    _find_version(recipe, info, on_progress)
    on_progress(f"run {info.run!r} at step {info.step} can continue with this recipe")


def _has_begun(info: RunInfo) -> bool:
    return info.lineage > 0 or info.origin is not None


def _compare(recipe: Recipe, info: RunInfo) -> None:
    wanted = recipe.constants
    known = {key: old for key, old in info.constants.items() if key in wanted}  # another release may have others
    differing = [f"{key} is {wanted[key]!r} and was {old!r}" for key, old in known.items() if wanted[key] != old]
    if differing:
        raise ConfigError(
            f"run {info.run!r} is in progress (step {info.step}) and could not continue with this recipe: "
            f"{'; '.join(differing)}, constant within a run. Set it back, or end the run first (`tba stop`) and give "
            "the next one another run.name"
        )


def _find_version(recipe: Recipe, info: RunInfo, on_progress: Callable[[str], None]) -> None:
    """Raise ConfigError where the version that searchers use is not in the store of the recipe, whatever its URL."""
    if info.latest_version is None:
        return
    store = open_store(recipe.store)
    try:
        is_there = WeightVersions(store, recipe.run.name).exists(PolicyVersion.parse(info.latest_version))
    except StoreError as error:
        on_progress(f"not compared with the store: {error}")
        return
    if not is_there:
        raise ConfigError(
            f"run {info.run!r} is in progress (step {info.step}), and its weight version {info.latest_version} is not "
            f"in {store.url}, which the new settings name (store.url, store.endpoint_url); set them back, or copy the "
            "run there"
        )
