"""`python -m tba_buffer --config FILE`: start the buffer service."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tba.early_signals import quit_on_signals

if TYPE_CHECKING:
    from tba.config import Recipe


def run(recipe: Recipe) -> None:
    """Check Redis, then serve until SIGTERM.

    Raises:
        ConfigError: Redis cannot be reached or could lose data, or the HTTP address or the Kubernetes API cannot be
            used.
        UnavailableError: Redis went away during the start, or a part of its log is missing.
    """
    from tba.server import serve
    from tba.tokens import server_tokens
    from tba_buffer.api.app import build_app
    from tba_buffer.service import check_redis

    tokens = server_tokens(recipe.auth.tokens_file)
    app = build_app(recipe, tokens)
    check_redis(recipe)
    section, start = recipe.buffer, app.state.start
    serve(app, host=section.host, port=section.port, tokens=tokens, tls=recipe.tls, start=start)


def main() -> int:
    """Return the exit code of the service."""
    # before the slow imports, so that a signal in these seconds ends the process in order
    quit_on_signals("buffer")
    from tba.service_main import service_main

    return service_main("buffer", run)


if __name__ == "__main__":
    sys.exit(main())
