"""`helm test`: one rollout goes in and comes out again, and nobody gets in without a token.

Runs in the buffer's image, with the token of a searcher and that of a viewer. The rollout answers a prompt of the run
and says that its score failed, so no batch ever has it. Every check prints a line; the first that fails ends the pod
with a sentence.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import urllib3

from tba.api import LeaseRequest, LeaseReturn
from tba.clients import BufferClient, RewardClient
from tba.clients.service_client import ServiceClient, tls_options
from tba.config import Recipe, load_recipe
from tba.errors import TbaError, UnavailableError
from tba.tokens import ClientToken, client_token
from tba.versions import START
from tba.wire import Rollout, Sampling, VersionSpan, encode_rollout, new_rollout_id, single_turn

PAUSE_S = 2.0


class CheckError(Exception):
    """A check failed; the message says what was found."""


def status_of(recipe: Recipe, method: str, url: str, token: str | None) -> int:
    """The status that an HTTP call gets."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with urllib3.PoolManager(**tls_options(url, recipe.tls.ca_file)) as http:
        return http.request(method, url, headers=headers, retries=False, timeout=30.0).status


def check_ready(url: str, ca_file: str | None, wait_s: float) -> None:
    """Wait until a service can do its work.

    Raises:
        CheckError: it could not for `wait_s`.
    """
    client, give_up = ServiceClient(url, ca_file=ca_file), time.monotonic() + wait_s
    while True:
        try:
            reason = client.not_ready()
        except UnavailableError as error:
            reason = str(error)
        if reason is None:
            return
        if time.monotonic() > give_up:
            raise CheckError(reason)
        time.sleep(PAUSE_S)


def check_refused(recipe: Recipe, viewer: ClientToken, wait_s: float) -> None:
    """No token, a wrong one, and one of another role get in nowhere."""
    if recipe.auth.tokens_file is None:
        raise CheckError("auth.tokens_file is not set: everybody gets in")
    buffer, reward = recipe.buffer_url, recipe.reward_url
    for url in (buffer, reward):
        check_ready(url, recipe.tls.ca_file, wait_s)
    wanted = [
        ("without a token", "GET", f"{buffer}/v1/run", None, 401),
        ("with a wrong token", "GET", f"{buffer}/v1/run", "not-a-token-of-anybody", 401),
        ("as a viewer", "POST", f"{buffer}/v1/run", viewer.value[0], 403),
        ("without a token", "GET", f"{reward}/v1/rewards", None, 401),
        ("with a wrong token", "GET", f"{reward}/v1/rewards", "not-a-token-of-anybody", 401),
    ]
    for how, method, url, token, status in wanted:
        found = status_of(recipe, method, url, token)
        if found != status:
            raise CheckError(f"{method} {url} {how} got {found}, not {status}")
        print(f"ok: {method} {url} {how} gets {status}", flush=True)


def wait_for_prompt(searcher: BufferClient, viewer: BufferClient, wait_s: float) -> tuple[str, str]:
    """(task, prompt id) of a prompt of the run.

    Raises:
        CheckError: there was none for `wait_s`.
    """
    give_up = time.monotonic() + wait_s
    while True:
        for rollout in viewer.list_rollouts(limit=1).rollouts:
            return rollout.task, rollout.prompt_id
        reply = searcher.lease(LeaseRequest(searcher_id="helm-test", max_leases=1))
        for lease in reply.leases:
            searcher.return_leases(LeaseReturn(searcher_id="helm-test", lease_ids=[lease.lease_id]))
            return lease.prompt.task, lease.prompt.prompt_id
        if time.monotonic() > give_up:
            raise CheckError(
                f"the run has neither a rollout nor a prompt to lease (wait: {reply.wait}) after {wait_s:g} s; look at "
                "the setup Job and at the trainer"
            )
        time.sleep(PAUSE_S)


def check_rollout(recipe: Recipe, viewer_token: ClientToken, wait_s: float) -> None:
    """Push one rollout and read it back."""
    searcher, viewer = (
        BufferClient(recipe.buffer_url, token=token, retry_s=wait_s, ca_file=recipe.tls.ca_file)
        for token in (client_token(recipe.auth.tokens_file, "searcher"), viewer_token)
    )
    task, prompt_id = wait_for_prompt(searcher, viewer, wait_s)
    now_s = time.time()
    rollout = Rollout(
        rollout_id=new_rollout_id(),
        run=recipe.run.name,
        task=task,
        prompt_id=prompt_id,
        visit_id=f"helm-test-{now_s:.3f}",
        sequences=single_turn([0], [0], "length"),
        response_text="pushed by helm test",
        version_spans=(VersionSpan.of(START, 0, 1),),
        sampling=Sampling.of(1.0),
        logprob_bytes=bytes(4),
        ref_logprob=None,
        reward=None,
        reward_status="failed",
        reward_reason="helm-test",
        reward_version=None,
        searcher_id="helm-test",
        started_at_s=now_s,
        finished_at_s=now_s,
    )
    (outcome,) = searcher.push([encode_rollout(rollout)]).outcomes
    if outcome.outcome != "new":
        raise CheckError(f"the rollout was not stored: {outcome.outcome}, {outcome.reason}")
    found = viewer.get_rollout(rollout.rollout_id.hex())
    if (found.prompt_id, found.response_text) != (prompt_id, rollout.response_text):
        raise CheckError(f"the rollout came back as another one: {found}")
    print(f"ok: rollout {rollout.rollout_id.hex()} was stored and read back", flush=True)


def check_rewards(recipe: Recipe, wait_s: float) -> None:
    """The reward service scores something."""
    token = client_token(recipe.auth.tokens_file, "searcher")
    client = RewardClient(recipe.reward_url, token=token, retry_s=wait_s, ca_file=recipe.tls.ca_file)
    tasks = sorted(reward.task for reward in client.rewards())
    if not tasks:
        raise CheckError(f"{recipe.reward_url} scores no task")
    print(f"ok: the reward service scores {', '.join(tasks)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when everything holds, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe")
    parser.add_argument("--viewer-tokens", required=True, metavar="FILE", help="tokens file with the role `viewer`")
    parser.add_argument(
        "--wait-s", type=float, default=300.0, help="how long services and prompts of a new release may take"
    )
    args = parser.parse_args(argv)
    try:
        recipe = load_recipe(args.config)
        viewer = client_token(args.viewer_tokens, "viewer")
        assert viewer is not None
        check_refused(recipe, viewer, args.wait_s)
        check_rewards(recipe, args.wait_s)
        check_rollout(recipe, viewer, args.wait_s)
    except (CheckError, TbaError) as error:
        print(f"error: helm test: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
