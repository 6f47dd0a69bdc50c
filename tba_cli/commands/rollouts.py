"""`tba rollouts list` and `tba rollouts export`: what is stored in a run, in progress or over."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar, cast

from tba.api import EVICTED_KEY, RolloutDetail, RolloutInfo, RolloutPage, TrainedStep
from tba.clients import BufferClient
from tba.clients.run_reader import RolloutFilters
from tba.errors import ConfigError
from tba.fields import escape_controls
from tba_cli.run_target import ended_run, open_client

T = TypeVar("T")
MAX_PER_PAGE = 100
FILTERS = {
    "prompt_id": "prompt_id",
    "task": "task",
    "version": "version",
    "from_version": "from_version",
    "to_version": "to_version",
    "status": "status",
    "min_reward": "min_reward",
    "max_reward": "max_reward",
    "searcher": "searcher_id",
    "finish_reason": "finish_reason",
    "contains": "contains",
}
"""Flag -> keyword of the client."""


def with_run(args: argparse.Namespace, use: Callable[[BufferClient], T]) -> T:
    """Return what `use` reads from the buffer of a run in progress, or from the files of one that is over."""
    if (ended := ended_run(args)) is not None:
        # no image holds the launcher
        from tba_cli.local.ended_run import read_ended

        return read_ended(ended, use)
    with closing(open_client(args)) as client:
        return use(client)


def filters_of(args: argparse.Namespace) -> RolloutFilters:
    """Return the filters that the flags name, as keywords of the client."""
    return cast(RolloutFilters, {name: getattr(args, flag) for flag, name in FILTERS.items()})


def list_command(args: argparse.Namespace) -> int:
    """Print prompt, completion, reward, version and age of each; of one all."""
    if args.id is not None:
        return _show(args)
    if args.tokens:
        raise ConfigError("--tokens shows those of one rollout; name it with --id")
    page = with_run(args, lambda client: _found(client, args))
    if args.json:
        print(page.model_dump_json(indent=2, ensure_ascii=True))
        return 0
    for rollout in page.rollouts:
        print("\n".join(lines_of(rollout)))
    if page.next is not None:
        print(f"there are more: --cursor {page.next}")
    elif not page.rollouts:
        print("no stored rollout matches")
    return 0


def _found(client: BufferClient, args: argparse.Namespace) -> RolloutPage:
    """Return as many rollouts as were asked for, if there are so many: a page may hold fewer."""
    rollouts: list[RolloutInfo] = []
    cursor, num_read = args.cursor, 0
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


def lines_of(rollout: RolloutInfo) -> list[str]:
    """Return a rollout of a list in three lines, or four where its prompt has gold data."""
    why = f" ({rollout.reward_reason})" if rollout.reward_reason else ""
    prompt = "not among the prompts of the run" if rollout.prompt_text is None else repr(rollout.prompt_text)
    more = " ..." if rollout.response_text_cut else ""
    return [
        f"{rollout.rollout_id}  reward {_reward(rollout)}{escape_controls(why)}, version {rollout.version}, age "
        f"{rollout.policy_age_steps} steps, {rollout.num_response_tokens} tokens, {rollout.finish_reason}",
        # a model may write anything, also the escapes that rewrite a terminal
        escape_controls(f"  prompt {rollout.prompt_id}: {prompt}"),
        *_gold_lines(rollout),
        escape_controls(f"  completion: {rollout.response_text!r}{more}"),
    ]


def _gold_lines(rollout: RolloutInfo) -> list[str]:
    # where the prompt is gone, the line of the prompt says so
    if rollout.prompt_text is None or rollout.prompt_data == {}:
        return []
    gold = "not in the list; see `tba rollouts list --id`" if rollout.prompt_data is None else str(rollout.prompt_data)
    return [escape_controls(f"  gold data: {gold}")]


def _show(args: argparse.Namespace) -> int:
    """Print all that is known of one rollout."""
    if not re.fullmatch("[0-9a-f]{32}", args.id):
        raise ConfigError(
            f"{args.id!r} is no rollout id: give all 32 hexadecimal digits, as `tba rollouts list` prints "
            "them; a part of them is not enough"
        )
    rollout = with_run(args, lambda client: client.get_rollout(args.id))
    if args.json:
        print(rollout.model_dump_json(indent=2, ensure_ascii=True))
        return 0
    lines = detail_lines(rollout)
    if args.tokens:
        lines += ["  response tokens:", *token_lines(rollout)]
    print("\n".join(map(escape_controls, lines)))
    return 0


def export_command(args: argparse.Namespace) -> int:
    """Write the rollouts that match to a Parquet file, the oldest first, and print how many."""
    path = Path(args.out)
    if path.suffix != ".parquet":
        raise ConfigError(f"--out {path} must end with .parquet")
    if path.exists() and not args.force:
        raise ConfigError(f"{path} exists; give another --out, or --force to replace it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of --out {path} does not exist; make it first")
    num_bytes = with_run(args, lambda client: client.export_rollouts(path, **filters_of(args)))
    found = _counts(path)
    if args.json:
        print(json.dumps({"out": str(path), **found, "num_bytes": num_bytes}, indent=1))
        return 0
    what = "the rollouts" if found["num_rollouts"] is None else f"{found['num_rollouts']} rollouts"
    evicted = f" ({found['num_evicted']} more were evicted before they were read)" if found["num_evicted"] else ""
    print(f"wrote {what}{evicted} to {path}, {num_bytes:,} bytes")
    return 0


def _counts(path: Path) -> dict[str, int | None]:
    """Return how many rollouts an export holds and how many are missing; None where pyarrow is not here to count."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        return {"num_rollouts": None, "num_evicted": None}
    metadata = parquet.read_metadata(path)
    num_evicted = int((metadata.metadata or {}).get(EVICTED_KEY.encode(), 0))
    return {"num_rollouts": metadata.num_rows, "num_evicted": num_evicted}


def detail_lines(rollout: RolloutDetail) -> list[str]:
    """Return a rollout without its tokens, one fact per line."""
    sampling, ref = rollout.sampling, rollout.ref_logprob
    spans = ", ".join(f"{span.start}-{span.end - 1} by {span.version}" for span in rollout.version_spans)
    why = f": {rollout.reward_reason}" if rollout.reward_reason else ""
    by = f", {rollout.reward_version}" if rollout.reward_version else ""
    seed = "none" if sampling.seed is None else sampling.seed
    lines = [
        f"rollout {rollout.rollout_id}, task {rollout.task}, prompt {rollout.prompt_id}",
        f"  reward {_reward(rollout)} ({rollout.reward_status}{by}){why}",
        *_part_lines(rollout),
        f"  version {rollout.version}, policy age {rollout.policy_age_steps} steps; response tokens {spans}",
        f"  {rollout.num_prompt_tokens} prompt tokens, {rollout.num_response_tokens} response tokens, ended by "
        f"{rollout.finish_reason}",
        f"  by {rollout.searcher_id} in {rollout.finished_at_s - rollout.started_at_s:.2f} s until "
        f"{_at(rollout.finished_at_s)}, visit {rollout.visit_id}",
        f"  sampling: temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, seed "
        f"{seed}, stop {sampling.stop or 'none'}",
    ]
    if ref is not None:
        lines.append(f"  log-prob of the reference {ref.version}: {ref.value:.4f}")
    lines.append(f"  {_drawn_text(rollout)}")
    lines += _trained_lines(rollout.trained)
    gold = "unknown: the run no longer has the prompt" if rollout.prompt_data is None else str(rollout.prompt_data)
    lines.append(f"  gold data: {gold}")
    prompt = "(not among the prompts of the run)" if rollout.prompt_text is None else rollout.prompt_text
    lines += ["  prompt:", *_indented(prompt), "  completion:", *_indented(rollout.response_text)]
    return lines


def token_lines(rollout: RolloutDetail) -> list[str]:
    """Return the table of the response tokens; the text of a token is left out where the service cannot tell it."""
    texts = rollout.token_texts or [None] * len(rollout.response_tokens)
    rows = zip(rollout.response_tokens, rollout.sampler_logprobs, texts, strict=True)
    return [
        f"    {'number':>6}  {'token':>8}  {'log-prob':>9}  text",
        *(
            f"    {number:>6}  {token:>8}  {logprob:>9.4f}  {'' if text is None else repr(text)}".rstrip()
            for number, (token, logprob, text) in enumerate(rows)
        ),
    ]


def _part_lines(rollout: RolloutInfo) -> list[str]:
    return [
        f"    {part.name}: {part.score:.4g}"
        + (", no longer in the recipe" if part.weight is None else f", weight {part.weight:g}")
        for part in rollout.reward_parts or []
    ]


def _drawn_text(rollout: RolloutDetail) -> str:
    return f"drawn by {rollout.num_batches} batches; {_trained_text(rollout)}"


def _trained_text(rollout: RolloutDetail) -> str:
    if rollout.trained_since is None:
        return "no step is kept that says what it made of its rollouts"
    if not rollout.trained:
        return f"trained by none of the steps from {rollout.trained_since} on"
    return f"trained by (kept from step {rollout.trained_since} on):"


def _trained_lines(steps: list[TrainedStep]) -> list[str]:
    lines = []
    for step in steps:
        notes = [] if step.skipped is None else [f"skipped: {step.skipped}"]
        notes += ["abandoned: the run went back"] if step.abandoned else []
        more = f" ({'; '.join(notes)})" if notes else ""
        numbers = f"advantage {_number(step.advantage)}, weight {_number(step.weight)}"
        lines.append(f"    step {step.version} at {_at(step.at_s)}: {numbers}{more}")
    return lines


def _reward(rollout: RolloutInfo) -> str:
    return rollout.reward_status if rollout.reward is None else f"{rollout.reward:.4g}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _at(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()] or ["    (empty)"]
