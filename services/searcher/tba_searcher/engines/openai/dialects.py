"""Which kind of server is behind an address, and a client of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tba.errors import ConfigError
from tba_searcher.engines.openai.server import GenerationServer, ServerClient
from tba_searcher.engines.openai.sglang_server import SglangServer
from tba_searcher.engines.openai.vllm_server import VllmServer

if TYPE_CHECKING:
    from tba_searcher.engines.openai.engine import OpenAiSettings

KINDS: dict[str, type[GenerationServer]] = {"vllm": VllmServer, "sglang": SglangServer}
"""`owned_by` of a server's models -> the kind of server."""


def connect(settings: OpenAiSettings, *, timeout_s: float) -> GenerationServer:
    """Ask a server of which kind it is, and return a client for that kind.

    Args:
        timeout_s: deadline of one call; calls are repeated for `retry_s` of the settings.

    Raises:
        ConfigError: it is of none that is known; or its token cannot be used.
        ServiceError: it does not answer, or refuses this client.
    """
    section = settings.section
    name = section.token_env
    token = None if name is None else os.environ.get(name)
    if name is not None and not token:
        raise ConfigError(
            f"searcher.openai.token_env: the environment variable {name} is not set; put the token for "
            f"{section.url} there"
        )

    url = section.url or ""
    options: dict[str, Any] = {
        "token": token,
        "retry_s": settings.retry_s,
        "timeout_s": timeout_s,
        "ca_file": settings.ca_file,
    }
    any_kind = ServerClient(url, **options)
    try:
        owner = any_kind.model().owned_by
    finally:
        any_kind.close()
    if owner not in KINDS:
        names = " and ".join(kind.name for kind in KINDS.values())
        raise ConfigError(
            f"{url} says that {owner or 'nobody'} owns its models (/v1/models), and servers of {names} "
            "alone are known to give exact log-probs and to take weights; give the address of such a server itself, "
            "not of a router before it"
        )
    return KINDS[owner](url, **options)
