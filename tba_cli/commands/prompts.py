"""`tba prompts upload|list`: upload the prompts of a file to a run; look at those of a run."""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Sequence

from tba.api import PromptDetail, PromptInfo
from tba.fields import escape_controls
from tba_cli.commands.rollouts import with_run
from tba_cli.prompts.reader import DEFAULT_CHUNK_BYTES, prompts_of_file, upload_prompts
from tba_cli.run_target import open_client

NUM_SHOWN = 3


def upload_command(args: argparse.Namespace) -> int:
    """Check every row, then upload in chunks; to upload the same file again changes nothing."""
    prompts = prompts_of_file(args.file)
    if args.dry_run:
        shown, num_by_split = prompts[:NUM_SHOWN], Counter(prompt.split for prompt in prompts)
        if args.json:
            first = [prompt.model_dump(mode="json") for prompt in shown]
            numbers = {"num_train": num_by_split["train"], "num_heldout": num_by_split["heldout"]}
            print(json.dumps({**numbers, "first": first}, indent=1))
            return 0
        for prompt in shown:
            print(prompt.model_dump_json(indent=2, ensure_ascii=True))
        print(
            f"{num_by_split['train']} prompts to train on and {num_by_split['heldout']} held out; nothing was uploaded"
        )
        return 0
    client = open_client(args)
    try:
        reply = upload_prompts(client, prompts, max_chunk_bytes=DEFAULT_CHUNK_BYTES)
    finally:
        client.close()
    if args.json:
        print(reply.model_dump_json(indent=1))
        return 0
    print(
        f"{reply.num_new} new and {reply.num_same} known prompts; "
        f"the run now has {reply.num_train} to train on and {reply.num_heldout} held out"
    )
    return 0


def list_command(args: argparse.Namespace) -> int:
    """Print a table: id, rollouts, mean, lowest and highest reward, text; of one prompt all."""
    if args.id is not None:
        return _show(args)
    page = with_run(
        args,
        lambda client: client.list_prompts(
            split=args.split,
            task=args.task,
            contains=args.contains,
            order=args.order,
            limit=args.limit,
            after=args.after,
            text_chars=args.text_chars,
        ),
    )
    if args.json:
        print(page.model_dump_json(indent=2, ensure_ascii=True))
        return 0
    if page.prompts:
        print("\n".join(table_lines(page.prompts)))
    more = "" if page.next is None else f"; there are more: --after {page.next}"
    print(f"{len(page.prompts)} of {page.num_matching} prompts that match{more}")
    return 0


def table_lines(prompts: Sequence[PromptInfo]) -> list[str]:
    """Return a line per prompt under a heading; rewards are those of its stored rollouts."""
    ids = [escape_controls(prompt.prompt_id) for prompt in prompts]
    width = max(len("prompt"), *map(len, ids))
    return [
        f"{'prompt':<{width}}  {'split':<7}  {'rollouts':>8}  {'mean':>7}  {'lowest':>7}  {'highest':>7}  text",
        *(
            f"{name:<{width}}  {prompt.split:<7}  {prompt.num_rollouts:>8}  {_reward(prompt.reward_mean):>7}  "
            # a text may hold the escapes that rewrite a terminal
            f"{_reward(prompt.reward_min):>7}  {_reward(prompt.reward_max):>7}  {escape_controls(repr(prompt.text))}"
            + (" ..." if prompt.text_cut else "")
            for name, prompt in zip(ids, prompts, strict=True)
        ),
    ]


def _show(args: argparse.Namespace) -> int:
    """Print all that is known of one prompt."""
    prompt = with_run(args, lambda client: client.get_prompt(args.id))
    print(
        prompt.model_dump_json(indent=2, ensure_ascii=True)
        if args.json
        else "\n".join(map(escape_controls, detail_lines(prompt)))
    )
    return 0


def detail_lines(prompt: PromptDetail) -> list[str]:
    """Return a prompt, one fact per line, and a line for each policy version that has stored rollouts of it."""
    rewards = (
        f"rewards {_reward(prompt.reward_mean)} on average, {_reward(prompt.reward_min)} to "
        f"{_reward(prompt.reward_max)}"
    )
    lines = [
        f"prompt {prompt.prompt_id}, task {prompt.task}, split {prompt.split}",
        f"  {prompt.num_rollouts} stored rollouts, {prompt.num_scored} scored"
        + ("; " + rewards) * bool(prompt.num_scored),
        *(
            f"    by {part.version}: {part.num_rollouts} rollouts, mean reward {_reward(part.reward_mean)}"
            for part in prompt.by_version
        ),
        f"  gold data: {prompt.data}",
        "  text:",
        *(f"    {line}" for line in prompt.text.splitlines() or ["(empty)"]),
    ]
    if prompt.num_rollouts:
        lines.append(f"  its rollouts: tba rollouts list --prompt-id {shlex.quote(prompt.prompt_id)}")
    return lines


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
