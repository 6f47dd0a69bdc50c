"""`python -m tba_reward --config FILE`."""

from __future__ import annotations

import sys

from tba.config import Recipe
from tba.main import service_main


def run(recipe: Recipe) -> None:
    """Serve until SIGTERM."""
    from tba.service import serve
    from tba.tokens import server_tokens
    from tba_reward.app import build_app

    tokens, section = server_tokens(recipe.auth.tokens_file), recipe.reward
    serve(build_app(recipe, tokens=tokens), host=section.host, port=section.port, tokens=tokens, tls=recipe.tls)


if __name__ == "__main__":  # worker processes import this module again
    sys.exit(service_main("reward", run))
