"""The target of the checks (the recipe, and the machine where it is checked), and the result of a check."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import urllib3
from pydantic import BaseModel

from tba.clients.service_client import tls_options
from tba.config import Recipe, load_recipe, parse_recipe
from tba.errors import ConfigError
from tba.tls import explain_missing_tls, explain_tls_error, is_loopback, with_bare_urls
from tba_cli.run_folder import RunFolder

ASKED: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
"""The services that answer over HTTP."""
M = TypeVar("M", bound=BaseModel)
SERVICES = ("buffer", "reward", "searcher", "trainer")
CALL_TIMEOUT_S = 5.0
"""Deadline of one call of a service."""
MAX_BODY_BYTES = 4 * 2**20
MAX_DETAIL_CHARS = 1000
Level = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that was checked.

    `warn`: it will hurt sooner or later, or cannot be judged yet. `fail`: it keeps the run from working. `skip`: it was
    not checked, for the reason that `found` gives.
    """

    code: str
    """Name of the result; docs/operations.md has a line for each."""
    level: Level
    found: str
    fix: str | None = None
    """The fix; only for `warn` and `fail`."""

    def __post_init__(self) -> None:
        """Show no secret of a URL."""
        object.__setattr__(self, "found", with_bare_urls(self.found))


def ok(code: str, found: str) -> CheckResult:
    """Return a result that needs no action."""
    return CheckResult(code, "ok", found)


def warn(code: str, found: str, fix: str) -> CheckResult:
    """Return a result that works now, or may work, but will not last."""
    return CheckResult(code, "warn", found, fix)


def fail(code: str, found: str, fix: str) -> CheckResult:
    """Return a result with which the run cannot work."""
    return CheckResult(code, "fail", found, fix)


def skip(code: str, found: str) -> CheckResult:
    """Return a result for something that was not checked; `found` says why."""
    return CheckResult(code, "skip", found)


class TlsProblem(str):
    """The reason why there is no answer, where waiting cannot help."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a service, and when it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    asked_at_s: float
    """Unix time at which the request was sent."""
    took_s: float

    @property
    def detail(self) -> str:
        """The sentence of a problem document, else the beginning of the body."""
        try:
            return str(json.loads(self.body)["detail"])[:MAX_DETAIL_CHARS]
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.body[:200].decode(errors="replace")

    def json(self) -> Any:
        """Return the parsed body, or None where it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):  # endless brackets
            return None


@dataclass(frozen=True, slots=True)
class Target:
    """The recipe, and the machine where it is checked."""

    recipe: Recipe
    services: frozenset[str]
    """The services that this machine or image is for; some checks make sense for one service only."""
    is_local: bool
    """`tba run` starts everything itself: a service that is not there is no problem."""
    is_going: bool
    """A local run of this name runs here, and `recipe` has its real addresses."""
    num_gpus: int | None = None
    """The number of GPUs that should be visible here; None: any."""
    has_recipe: bool = True
    """False: only the machine is checked, and `recipe` has the defaults."""

    def url(self, service: Literal["buffer", "reward"]) -> str | None:
        """Return the URL of a service, or None where it is not known yet."""
        section = self.recipe.buffer if service == "buffer" else self.recipe.reward
        if section.url is None and section.port == 0:
            return None
        return self.recipe.buffer_url if service == "buffer" else self.recipe.reward_url

    def ask(self, service: Literal["buffer", "reward"], path: str, *, token: str | None = None) -> Answer | str:
        """GET a path of a service; return the answer, or the reason why there is none."""
        url = self.url(service)
        if url is None:
            return f"the address of the {service} service is not known before `tba run` chooses its port"
        return http_get(url + path, token=token, ca_file=self.recipe.tls.ca_file)

    def read(self, service: Literal["buffer", "reward"], path: str, reply: type[M], *, token: str | None) -> M | None:
        """Return the parsed answer to a GET; None: there is none, or it is not what this release expects."""
        answer = self.ask(service, path, token=token)
        if not isinstance(answer, Answer) or answer.status != 200:
            return None
        try:
            return reply.model_validate_json(answer.body)
        except ValueError:
            return None


def http_get(url: str, *, token: str | None = None, ca_file: str | None = None) -> Answer | str:
    """GET a URL once; return the answer, or the reason why there is none."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    asked_at_s, begun_s = time.time(), time.monotonic()
    try:
        with urllib3.PoolManager(**tls_options(url, ca_file)) as pool:
            reply = pool.request(
                "GET",
                url,
                headers=headers,
                redirect=False,
                retries=False,
                timeout=urllib3.Timeout(total=CALL_TIMEOUT_S),
                preload_content=False,
            )
            body = reply.read(MAX_BODY_BYTES)
            took_s = time.monotonic() - begun_s
            reply.release_conn()
    except ConfigError as error:
        return TlsProblem(error)
    except urllib3.exceptions.HTTPError as error:
        problem = explain_tls_error(error, where="/".join(url.split("/")[:3]), ca_file=ca_file)
        # a TLS server closes a plain connection: to this client that is only a protocol error
        if problem is None and isinstance(error, urllib3.exceptions.ProtocolError):
            problem = explain_missing_tls(url, ca_file=ca_file)
        if problem is not None:
            return TlsProblem(problem)
        return f"{url} does not answer ({type(error).__name__}: {_without_prefix(error)})"
    return Answer(reply.status, reply.headers, body, asked_at_s, took_s)


def target_of(recipe: Recipe, *, service: str | None, num_gpus: int | None = None) -> Target:
    """Return the target for a recipe, with the real addresses where its run runs here.

    Args:
        service: what this machine is for; None: every service that is installed here, all of them if none is.
        num_gpus: how many GPUs should be visible here.
    """
    # `tba run` may listen beyond loopback too, with tokens of its own; a service alone that does so is a deployment
    is_local = recipe.buffer.url is None and (service is None or is_loopback(recipe.buffer.host))
    folder, is_going = RunFolder(Path(recipe.local.runs_dir) / recipe.run.name), False
    if is_local and folder.endpoints_path.is_file() and folder.config_path.is_file():
        recipe, is_going = load_recipe(folder.config_path, environ={}), True
    return Target(recipe, _services(service), is_local, is_going, num_gpus)


def machine_target(*, service: str | None, num_gpus: int | None = None) -> Target:
    """Return the target for a machine alone, without a recipe; arguments as those of `target_of`."""
    required = {"run": {"name": "none"}, "model": {"path": "none"}, "data": {"generator": "addition"}}
    # with port 0 no service is asked: without a recipe no address is known
    recipe = parse_recipe({**required, "buffer": {"port": 0}, "reward": {"port": 0}}, where="defaults")
    return Target(recipe, _services(service), is_local=True, is_going=False, num_gpus=num_gpus, has_recipe=False)


def _services(service: str | None) -> frozenset[str]:
    if service is not None:
        return frozenset({service})
    found = frozenset(name for name in SERVICES if importlib.util.find_spec(f"tba_{name}") is not None)
    return found or frozenset(SERVICES)


def _without_prefix(error: Exception) -> str:
    """Return the text of an error of urllib3 without the representation of the connection in front."""
    return str(error).partition(": ")[2][:200] or str(error)[:200]
