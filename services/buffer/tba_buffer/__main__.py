"""`python -m tba_buffer --config FILE`: start the buffer service."""

from __future__ import annotations

import sys

from tba.config import Recipe
from tba.main import service_main


def run(recipe: Recipe) -> None:
    """Check Redis, then serve until SIGTERM.

    Raises:
        ConfigError: Redis cannot be reached or could lose data, or the address or the Kubernetes API cannot be
            used.
    """
    from tba.service import serve
    from tba.tokens import server_tokens
    from tba_buffer.app import build_app
    from tba_buffer.buffer import check_redis

    tokens = server_tokens(recipe.auth.tokens_file)
    app = build_app(recipe, tokens)
    check_redis(recipe)
    serve(app, host=recipe.buffer.host, port=recipe.buffer.port, tokens=tokens, tls=recipe.tls)


if __name__ == "__main__":
    sys.exit(service_main("buffer", run))
