"""`python -m tba_reward --config FILE`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tba.starting import quit_on_signals

if TYPE_CHECKING:
    from tba.config import Recipe

_UNUSED = {"run": {"name": "reward"}, "model": {"path": "none"}, "data": {"generator": "addition"}}
"""What a recipe of a run has and this service makes no use of: alone, `[reward]` is all that it needs."""


def run(recipe: Recipe) -> None:
    """Serve until SIGTERM."""
    from tba.service import serve
    from tba.tokens import server_tokens
    from tba_reward.app import build_app

    tokens, section = server_tokens(recipe.auth.tokens_file), recipe.reward
    serve(build_app(recipe, tokens=tokens), host=section.host, port=section.port, tokens=tokens, tls=recipe.tls)


def main() -> int:
    """Exit code of the service; signals first, then everything else is imported."""
    quit_on_signals("reward")
    from tba.main import service_main

    return service_main("reward", run, stand_ins=_UNUSED)


if __name__ == "__main__":  # worker processes import this module again
    sys.exit(main())
