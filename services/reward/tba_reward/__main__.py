"""Run the reward service: `python -m tba_reward --config FILE`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tba.early_signals import quit_on_signals

if TYPE_CHECKING:
    from tba.config import Recipe

_UNUSED = {"run": {"name": "reward"}, "model": {"path": "none"}, "data": {"generator": "addition"}}
"""Stand-ins for sections that every recipe must have but this service ignores: a `[reward]` section alone is enough."""


def run(recipe: Recipe) -> None:
    """Serve scores over HTTP until SIGTERM."""
    from tba.server import serve
    from tba.tokens import server_tokens
    from tba_reward.app import build_app

    tokens, section = server_tokens(recipe.auth.tokens_file), recipe.reward
    serve(build_app(recipe, tokens=tokens), host=section.host, port=section.port, tokens=tokens, tls=recipe.tls)


def main() -> int:
    """Run the service and return its exit code."""
    # before the heavy imports, so that SIGTERM ends the process while they run
    quit_on_signals("reward")
    from tba.service_main import service_main

    return service_main("reward", run, stand_ins=_UNUSED)


if __name__ == "__main__":  # worker processes import this module again
    sys.exit(main())
