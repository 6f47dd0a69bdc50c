"""`python -m tba.health`: the HEALTHCHECK of the images; exit code 0 if healthy, else 1 and a sentence.

    python -m tba.health 8700                                 # buffer, reward service: ask the /readyz of this port
    python -m tba.health --config /etc/tba/recipe.toml        # trainer, searcher: ask the buffer about its heartbeat

The first form imports the standard library alone, to be fast: containers run it every few seconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import ssl
import sys

TIMEOUT_S = 4.0
"""Deadline of one request."""


def readiness_problem(port: int) -> str | None:
    """Return why the service on this loopback port is not ready; None if it is."""
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        return _ask(plain, port)
    except (http.client.HTTPException, ConnectionResetError):
        pass  # not HTTP: perhaps TLS
    except OSError as error:
        return f"nothing answers on port {port}: {error}"
    context = ssl.create_default_context()
    context.check_hostname = False  # the certificate names another host than loopback
    context.verify_mode = ssl.CERT_NONE
    try:
        return _ask(http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context), port)
    except (http.client.HTTPException, OSError) as error:
        return f"port {port} answers neither HTTP nor TLS: {error}"


def heartbeat_problem(config: str) -> str | None:
    """Ask the buffer whether a component of this host is alive. Return None if one is, else the reason in words."""
    from tba.clients import BufferClient
    from tba.config import load_recipe
    from tba.errors import TbaError
    from tba.tokens import load_tokens

    try:
        recipe = load_recipe(config)
        tokens = load_tokens(recipe.auth.tokens_file) or {}
        # the tokens file of a container has the tokens of its own service alone; each of these may read the state
        token = next((tokens[role] for role in ("viewer", "operator", "trainer", "searcher") if role in tokens), None)
        info = BufferClient(recipe.buffer_url, token=token, retry_s=TIMEOUT_S).run()
    except TbaError as error:
        return str(error)
    name = os.environ.get("TBA_SEARCHER_ID") or socket.gethostname()
    # a trainer or searcher has the name of its host in its component id
    own = [component for component in info.components if name in component.component_id]
    if any(component.alive for component in own):
        return None
    if not own:
        return f"the buffer has not heard from a component of host {name} yet"
    return f"the buffer last heard from {own[-1].component_id} {min(c.heartbeat_age_s for c in own):.0f} s ago"


def main() -> int:
    """Run the check of the command line; print the problem, and return the exit code: 0 if healthy, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tba.health", description=__doc__)
    parser.add_argument("port", nargs="?", type=int, help="port of the service in this container")
    parser.add_argument("--config", metavar="FILE", help="recipe of a trainer or searcher")
    args = parser.parse_args()
    if (args.port is None) == (args.config is None):
        parser.error("give either a port or --config")
    reason = heartbeat_problem(args.config) if args.port is None else readiness_problem(args.port)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
    return int(reason is not None)


def _ask(connection: http.client.HTTPConnection, port: int) -> str | None:
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        # bounded: this runs every few seconds, whatever listens on the port
        body = response.read(65536)
    finally:
        connection.close()
    if response.status == 200:
        return None
    try:
        detail = json.loads(body).get("detail", "")
    except (ValueError, AttributeError):
        detail = body[:200].decode(errors="replace")
    return f"port {port} answers {response.status}: {detail}"


if __name__ == "__main__":
    sys.exit(main())
