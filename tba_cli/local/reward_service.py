"""Start a reward service for one command, for as long as the command needs scores."""

from __future__ import annotations

import asyncio
from contextlib import closing

from tba.clients import RewardClient
from tba.config import Recipe, parse_recipe
from tba.errors import WaitTimeoutError
from tba.tokens import role_token
from tba_cli.console import Console
from tba_cli.local.processes import ProcessManager
from tba_cli.local.services import process_spec, wait_for_reward
from tba_cli.ports import PortRequest, choose_ports
from tba_cli.run_folder import RunFolder

LOOPBACK = "127.0.0.1"
ASK_TIMEOUT_S = 5.0


def with_own_reward(recipe: Recipe, folder: RunFolder) -> Recipe:
    """Return the recipe with a free loopback address for the service, and new tokens unless it has a tokens file."""
    (port,) = choose_ports([PortRequest("reward.port", LOOPBACK, 0)])
    document = recipe.model_dump(mode="json")
    document["reward"] |= {"host": LOOPBACK, "port": port, "url": f"{recipe.tls.scheme}://{LOOPBACK}:{port}"}
    # other users of this machine can connect to it
    if recipe.auth.tokens_file is None:
        folder.make_secrets()
        document["auth"]["tokens_file"] = str(folder.tokens_path("all"))
    return parse_recipe(document, where="recipe")


async def start_reward(processes: ProcessManager, config: Recipe, folder: RunFolder, console: Console) -> None:
    """Start a reward service with the config.json of the folder, and wait until it is ready.

    Raises:
        WaitTimeoutError: it was not ready within `local.start_timeout_s`.
    """
    console.info(f"starting a reward service at {config.reward_url}")
    await processes.start(process_spec(config, folder, "reward"))
    timeout_s = config.local.start_timeout_s
    with closing(reward_client(config)) as client:
        try:
            async with asyncio.timeout(timeout_s):
                await wait_for_reward(client, config.tls.ca_file, on_progress=console.info)
        except TimeoutError:
            raise WaitTimeoutError(
                f"wait 'reward-start': the reward service was not ready within {timeout_s:.0f} s "
                f"(local.start_timeout_s); see {folder.log_path('reward')}"
            ) from None


def reward_client(config: Recipe, *, timeout_s: float = ASK_TIMEOUT_S) -> RewardClient:
    """Return a client of the recipe's reward service that does not retry calls."""
    token = role_token(config.auth.tokens_file, "searcher")
    return RewardClient(config.reward_url, token=token, retry_s=0, timeout_s=timeout_s, ca_file=config.tls.ca_file)
