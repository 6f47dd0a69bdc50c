"""`tba rollouts list` and `tba rollouts export`: show the stored rollouts of a run in progress or an ended run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar, cast

from tba.api import EVICTED_KEY, RolloutInfo, RolloutPage
from tba.clients import BufferClient
from tba.clients.buffer import RolloutFilters
from tba.errors import ConfigError
from tba.fields import escape_controls
from tba_cli.console import print_answer
from tba_cli.run_target import ended_run, open_client

T = TypeVar("T")
MAX_PER_PAGE = 100


def with_run(args: argparse.Namespace, use: Callable[[BufferClient], T]) -> T:
    """Call `use` with a client of the run's buffer, and return its result. An ended run gets a read-only buffer."""
    if (ended := ended_run(args)) is not None:
        # no image holds the launcher
        from tba_cli.local.ended_run import read_ended

        return read_ended(ended, use)
    with closing(open_client(args)) as client:
        return use(client)


def filters_of(args: argparse.Namespace) -> RolloutFilters:
    """Return the filters that the flags set, as keyword arguments of the client's methods."""
    return cast(RolloutFilters, {name: getattr(args, name) for name in RolloutFilters.__annotations__})


def list_command(args: argparse.Namespace) -> int:
    """Print prompt, completion, reward, version and age of each rollout; with --id, all of one rollout as JSON."""
    if args.id is not None:
        if not re.fullmatch("[0-9a-f]{32}", args.id):
            raise ConfigError(
                f"{args.id!r} is no rollout id: give all 32 hexadecimal digits, as `tba rollouts list` prints "
                "them; a part of them is not enough"
            )
        found = with_run(args, lambda client: client.get_rollout(args.id))
        print(found.model_dump_json(indent=2, ensure_ascii=True))
        return 0

    def read(client: BufferClient) -> RolloutPage:
        """Read pages until there are --limit rollouts or no more: a page may hold fewer than were asked for."""
        rollouts: list[RolloutInfo] = []
        cursor, num_read = None, 0
        while True:
            page = client.list_rollouts(
                order=args.order,
                limit=min(MAX_PER_PAGE, args.limit - len(rollouts)),
                cursor=cursor,
                text_chars=args.text_chars,
                **filters_of(args),
            )
            rollouts += page.rollouts
            cursor, num_read = page.next, num_read + page.num_read
            if cursor is None or len(rollouts) >= args.limit:
                return RolloutPage(rollouts=rollouts, next=cursor, num_read=num_read)

    page = with_run(args, read)
    lines = [line for rollout in page.rollouts for line in lines_of(rollout)] or ["no stored rollout matches"]
    if page.next is not None:
        lines.append("there are more: raise --limit")
    print_answer(page, lines, as_json=args.json)
    return 0


def lines_of(rollout: RolloutInfo) -> list[str]:
    """Return a rollout as three lines of text, or four if its prompt has gold data."""
    why = f" ({rollout.reward_reason})" if rollout.reward_reason else ""
    reward = rollout.reward_status if rollout.reward is None else f"{rollout.reward:.4g}"
    prompt = "not among the prompts of the run" if rollout.prompt_text is None else repr(rollout.prompt_text)
    more = " ..." if rollout.response_text_cut else ""
    lines = [
        f"{rollout.rollout_id}  reward {reward}{escape_controls(why)}, version {rollout.version}, age "
        f"{rollout.policy_age_steps} steps, {rollout.num_response_tokens} tokens, {rollout.finish_reason}",
        # a model may write anything, also the escapes that rewrite a terminal
        escape_controls(f"  prompt {rollout.prompt_id}: {prompt}"),
    ]
    # where the prompt is gone, the line of the prompt says so
    if rollout.prompt_text is not None and rollout.prompt_data != {}:
        has_gold = rollout.prompt_data is not None
        gold = str(rollout.prompt_data) if has_gold else "not in the list; see `tba rollouts list --id`"
        lines.append(escape_controls(f"  gold data: {gold}"))
    if (episode := rollout.episode) is not None:
        how = "cut off by" if episode.is_truncated else "ended by"
        lines.append(
            escape_controls(
                f"  episode of {episode.environment}: {episode.num_turns} turns, {episode.num_tool_calls} tool calls, "
                f"{how} {episode.stop_condition}"
            )
        )
    return [*lines, escape_controls(f"  completion: {rollout.response_text!r}{more}")]


def export_command(args: argparse.Namespace) -> int:
    """Write the rollouts that match the filters to a Parquet file, oldest first, and print how many."""
    path = Path(args.out)
    if path.suffix != ".parquet":
        raise ConfigError(f"--out {path} must end with .parquet")
    if path.exists() and not args.force:
        raise ConfigError(f"{path} exists; give another --out, or --force to replace it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of --out {path} does not exist; make it first")
    num_bytes = with_run(args, lambda client: client.export_rollouts(path, **filters_of(args)))
    num_rollouts = num_evicted = None
    with suppress(ModuleNotFoundError):  # where pyarrow is not here, nobody counts
        from pyarrow import parquet

        metadata = parquet.read_metadata(path)
        num_rollouts, num_evicted = metadata.num_rows, int((metadata.metadata or {}).get(EVICTED_KEY.encode(), 0))
    what = "the rollouts" if num_rollouts is None else f"{num_rollouts} rollouts"
    evicted = f" ({num_evicted} more were evicted before they were read)" if num_evicted else ""
    document = {"out": str(path), "num_rollouts": num_rollouts, "num_evicted": num_evicted, "num_bytes": num_bytes}
    print_answer(document, [f"wrote {what}{evicted} to {path}, {num_bytes:,} bytes"], as_json=args.json)
    return 0
