"""The target of the checks (the recipe, and the machine where it is checked), and the result of a check."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tba.clients.service_client import Reply, ServiceClient, parse_reply
from tba.config import Recipe, load_recipe
from tba.errors import BadReplyError, ConfigError, ServiceError, TlsError, UnavailableError
from tba.fields import StrictModel
from tba.tls import is_loopback, with_bare_urls
from tba_cli.run_folder import RunFolder

ASKED: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
"""The services that answer over HTTP."""
M = TypeVar("M", bound=StrictModel)
SERVICES = ("buffer", "reward", "searcher", "trainer")
CALL_TIMEOUT_S = 5.0
"""Deadline of one call of a service."""
Level = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that was checked.

    `warn`: it may cause trouble later, or cannot be judged yet. `fail`: it keeps the run from working. `skip`: it was
    not checked, for the reason that `found` gives.
    """

    code: str
    """Name of the result; docs/operations.md has a line for each."""
    level: Level
    found: str
    fix: str | None = None
    """The fix; only for `warn` and `fail`."""

    def __post_init__(self) -> None:
        """Remove user, password and options from the URLs in `found`."""
        object.__setattr__(self, "found", with_bare_urls(self.found))


def ok(code: str, found: str) -> CheckResult:
    """Return a result that needs no action."""
    return CheckResult(code, "ok", found)


def warn(code: str, found: str, fix: str) -> CheckResult:
    """Return a result for something that may cause trouble later, or cannot be judged yet."""
    return CheckResult(code, "warn", found, fix)


def fail(code: str, found: str, fix: str) -> CheckResult:
    """Return a result for a problem that keeps the run from working."""
    return CheckResult(code, "fail", found, fix)


def skip(code: str, found: str) -> CheckResult:
    """Return a result for something that was not checked; `found` says why."""
    return CheckResult(code, "skip", found)


@dataclass(frozen=True, slots=True)
class Target:
    """The recipe, and the machine where it is checked."""

    recipe: Recipe
    services: frozenset[str]
    """The services that this machine or image is for; some checks make sense for one service only."""
    is_local: bool
    """Whether `tba run` starts all services on this machine, so that a missing service is no problem."""
    is_going: bool
    """Whether a local run of this name is in progress here; `recipe` then has its real addresses."""
    num_gpus: int | None = None
    """The number of GPUs that should be visible here; None: any."""

    def url(self, service: Literal["buffer", "reward"]) -> str | None:
        """Return the URL of a service; None if `tba run` has not chosen its port yet."""
        section = self.recipe.buffer if service == "buffer" else self.recipe.reward
        if section.url is None and section.port == 0:
            return None
        return self.recipe.buffer_url if service == "buffer" else self.recipe.reward_url

    def ask(self, service: Literal["buffer", "reward"], path: str, *, token: str | None = None) -> Reply | ServiceError:
        """Send one GET request to a service; return the reply, or the error if there is none."""
        url = self.url(service)
        if url is None:
            return UnavailableError(f"the address of the {service} service is not known before `tba run` chooses it")
        ca_file = self.recipe.tls.ca_file
        try:
            client = ServiceClient(url, token=token, retry_s=0.0, timeout_s=CALL_TIMEOUT_S, ca_file=ca_file)
        except ConfigError as error:
            return TlsError(str(error))
        with closing(client):
            try:
                return client.ask(path)
            except ServiceError as error:
                return error

    def read(self, service: Literal["buffer", "reward"], path: str, reply: type[M], *, token: str | None) -> M | None:
        """Return the parsed reply to a GET; None if there is none, its status is not 200, or it cannot be parsed."""
        answer = self.ask(service, path, token=token)
        if isinstance(answer, ServiceError) or answer.status != 200:
            return None
        try:
            return parse_reply(answer, reply)
        except BadReplyError:
            return None


def target_of(recipe: Recipe, *, service: str | None, num_gpus: int | None = None) -> Target:
    """Return the target for a recipe, with the real addresses if its run is in progress here.

    Args:
        service: the service that this machine is for; None: the services installed here, or all if none is installed.
    """
    # `tba run` may listen beyond loopback too, with tokens of its own; a service alone that does so is a deployment
    is_local = recipe.buffer.url is None and (service is None or is_loopback(recipe.buffer.host))
    folder, is_going = RunFolder(Path(recipe.local.runs_dir) / recipe.run.name), False
    # the lock and not a file: a supervisor that was killed leaves its files behind
    if is_local and folder.is_in_use and folder.endpoints_path.is_file() and folder.config_path.is_file():
        recipe, is_going = load_recipe(folder.config_path, environ={}), True
    installed = [name for name in SERVICES if importlib.util.find_spec(f"tba_{name}") is not None]
    services = frozenset(installed or SERVICES if service is None else [service])
    return Target(recipe, services, is_local, is_going, num_gpus)
