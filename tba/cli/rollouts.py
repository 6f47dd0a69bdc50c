"""`tba rollouts`: a few of the stored rollouts, of a run that is going or of one that is over."""

from __future__ import annotations

import argparse

from tba.api import RolloutInfo, RolloutPage
from tba.cli.target import ended_run, open_client
from tba.clients import BufferClient
from tba.local.saving import read_ended
from tba.plain_text import shown


def rollouts_command(args: argparse.Namespace) -> int:
    """Print prompt, completion, reward, version and age of each."""
    folder = ended_run(args)
    if folder is not None:
        page = read_ended(folder, lambda client: _page(client, args))
    else:
        client = open_client(args)
        try:
            page = _page(client, args)
        finally:
            client.close()
    if args.json:
        print(page.model_dump_json(indent=2))
        return 0
    for rollout in page.rollouts:
        print("\n".join(_lines(rollout)))
    if not page.rollouts:
        print("no stored rollout is like that")
    elif page.next is not None:
        print(f"there are more: --cursor {page.next}")
    return 0


def _page(client: BufferClient, args: argparse.Namespace) -> RolloutPage:
    return client.list_rollouts(
        order=args.order,
        prompt_id=args.prompt_id,
        version=args.version,
        status=args.status,
        limit=args.limit,
        cursor=args.cursor,
        text_chars=args.text_chars,
    )


def _lines(rollout: RolloutInfo) -> list[str]:
    reward = rollout.reward_status if rollout.reward is None else f"{rollout.reward:.4g}"
    why = f" ({rollout.reward_reason})" if rollout.reward_reason else ""
    prompt = "not among the prompts of the run" if rollout.prompt_text is None else repr(rollout.prompt_text)
    more = " ..." if rollout.response_text_cut else ""
    return [
        f"{rollout.rollout_id}  reward {reward}{shown(why)}, version {rollout.version}, age {rollout.policy_age_steps} "
        f"steps, {rollout.num_response_tokens} tokens, {rollout.finish_reason}",
        shown(f"  prompt {rollout.prompt_id}: {prompt}"),
        shown(f"  completion: {rollout.response_text!r}{more}"),
    ]
