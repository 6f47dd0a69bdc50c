"""What is examined: the recipe, what this machine or image is for, and the answers of services over HTTP."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import urllib3

from tba.clients.http import tls_trust
from tba.config import Recipe
from tba.errors import ConfigError
from tba.local.run_folder import RunFolder
from tba.loopback import is_loopback
from tba.trust import missed_tls, tls_trouble

SERVICES = ("buffer", "reward", "searcher", "trainer")
CALL_TIMEOUT_S = 5.0
"""Deadline of one call of a service."""
MAX_BODY_BYTES = 4 * 2**20
MAX_DETAIL_CHARS = 1000


class TlsTrouble(str):
    """Why there is no answer, where that will not pass by itself."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service answered, and when."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    asked_at_s: float
    """Unix time when the question went out."""
    took_s: float

    @property
    def detail(self) -> str:
        """The sentence of a problem document, else the beginning of the body."""
        try:
            return str(json.loads(self.body)["detail"])[:MAX_DETAIL_CHARS]
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.body[:200].decode(errors="replace")

    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):  # brackets without end
            return None


@dataclass(frozen=True, slots=True)
class Patient:
    """The recipe, and where it is looked at."""

    recipe: Recipe
    services: frozenset[str]
    """What this machine or image is for; some probes make sense for one service alone."""
    is_local: bool
    """`tba run` starts everything itself: services that are not there are no trouble."""
    is_going: bool
    """A local run of this name is going here, and `recipe` has its real addresses."""
    num_gpus: int | None = None
    """Exactly so many GPUs should be seen here; None: nobody said."""

    def url(self, service: Literal["buffer", "reward"]) -> str | None:
        """Where a service is; None: nobody knows yet."""
        section = self.recipe.buffer if service == "buffer" else self.recipe.reward
        if section.url is None and section.port == 0:
            return None
        return self.recipe.buffer_url if service == "buffer" else self.recipe.reward_url

    def ask(self, service: Literal["buffer", "reward"], path: str, *, token: str | None = None) -> Answer | str:
        """GET a path of a service; a text says why there is no answer."""
        url = self.url(service)
        if url is None:
            return f"the address of the {service} service is not known before `tba run` chooses its port"
        return http_get(url + path, token=token, ca_file=self.recipe.tls.ca_file)


def http_get(url: str, *, token: str | None = None, ca_file: str | None = None) -> Answer | str:
    """GET an address once; a text says why there is no answer."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    asked_at_s, begun_s = time.time(), time.monotonic()
    try:
        with urllib3.PoolManager(**tls_trust(url, ca_file)) as pool:
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
        return TlsTrouble(error)
    except urllib3.exceptions.HTTPError as error:
        trouble = tls_trouble(error, where="/".join(url.split("/")[:3]), ca_file=ca_file)
        if trouble is None and isinstance(error, urllib3.exceptions.ProtocolError):
            trouble = missed_tls(url, ca_file=ca_file)
        if trouble is not None:
            return TlsTrouble(trouble)
        return f"{url} does not answer ({type(error).__name__}: {_short(error)})"
    return Answer(reply.status, reply.headers, body, asked_at_s, took_s)


def patient_of(recipe: Recipe, *, service: str | None, num_gpus: int | None = None) -> Patient:
    """The patient of a recipe as it was read.

    Args:
        service: what this machine is for; None: every service that is installed here, all of them if none is.
        num_gpus: how many GPUs should be seen here.
    """
    from tba.config import load_recipe

    # `tba run` may listen beyond loopback too, with tokens of its own; a service alone that does so is a deployment
    is_local = recipe.buffer.url is None and (service is None or is_loopback(recipe.buffer.host))
    folder, is_going = RunFolder(Path(recipe.local.runs_dir) / recipe.run.name), False
    if is_local and folder.endpoints_path.is_file() and folder.config_path.is_file():
        recipe, is_going = load_recipe(folder.config_path, environ={}), True
    if service is not None:
        services = frozenset({service})
    else:
        services = frozenset(name for name in SERVICES if importlib.util.find_spec(f"tba_{name}") is not None)
    return Patient(recipe, services or frozenset(SERVICES), is_local, is_going, num_gpus)


def _short(error: Exception) -> str:
    return str(error).partition(": ")[2][:200] or str(error)[:200]
