"""Follow a run through the buffer service until it is over, and print how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from statistics import fmean

from tba.api import RunInfo, Stats
from tba.clients import BufferClient
from tba.errors import ChildError, UnavailableError
from tba.fields import escape_controls
from tba.versions import START
from tba_cli.console import Console
from tba_cli.reports.outputs import failures_line

Values = Mapping[str, Sequence[float | None]]
POLL_INTERVAL_S = 1.0
LINE_INTERVAL_S = 5.0
MIN_ETA_STEPS = 3  # the first take longer than others
NUM_RECENT = 10
FACTS = {
    "reward_mean": "reward {:.3f}",
    "completions/mean_length": "length {:.0f}",
    "completions/clipped_ratio": "cut off {:.0%}",
    "frac_reward_zero_std": "groups without a difference {:.0%}",
}
"""What is shown of the newest step, and of the reward also the mean of NUM_RECENT steps."""


async def until_over(
    client: BufferClient,
    console: Console,
    *,
    num_steps: int,
    silence_s: float,
    on_run: Callable[[RunInfo], Awaitable[None]],
    failed_lineage: int | None = None,
) -> RunInfo:
    """Poll the run about once a second until it is done; print a line every 5 s, and what to try in a state that lasts.

    The wait as a whole has no deadline.

    Args:
        silence_s: longest time without an answer of the buffer service (wait `buffer-poll`).
        on_run: called with the run after every poll, until it is over.
        failed_lineage: the lineage whose failure is being resumed: the run stays `failed` until the trainer has taken a
            new one.

    Raises:
        ChildError: the run failed, or the buffer service was silent for too long.
    """
    num_failed, lineage, first_step, first_at_s, line_at_s = 0, 0, 0, 0.0, float("-inf")
    state = told = ""
    answered_at_s = time.monotonic()
    while True:
        try:
            info, stats = await asyncio.to_thread(lambda: (client.run(), client.stats()))
            is_due = time.monotonic() - line_at_s >= LINE_INTERVAL_S
            said = await asyncio.to_thread(client.summary) if is_due else None
            recent = await asyncio.to_thread(_recent, client, info.step) if is_due else {}
        except UnavailableError as error:
            if time.monotonic() - answered_at_s > silence_s:
                raise ChildError(f"wait 'buffer-poll': no answer for {silence_s:.0f} s: {error}") from None
            await asyncio.sleep(POLL_INTERVAL_S)
            continue
        answered_at_s = now_s = time.monotonic()
        # the first failures, and then every ten times as many
        if stats.num_failed >= max(1, 10 * num_failed):
            num_failed = stats.num_failed
            console.info(escape_controls(failures_line(num_failed, [item.example for item in stats.failed_reasons])))
        # a resume or a rollback went back some steps, which says nothing of the pace
        if info.lineage != lineage:
            lineage, first_step, first_at_s = info.lineage, info.step, now_s
        if said is not None:
            line_at_s, made = now_s, info.step - first_step
            step_s = (now_s - first_at_s) / made if made >= MIN_ETA_STEPS else None
            console.info(escape_controls(progress_line(info, stats, said.state, recent, num_steps, step_s)))
            if said.remedy is not None and said.state == state != told:
                console.info(escape_controls(said.line))
                told = state
            state = said.state
        if info.state == "done":
            return info
        # the buffer keeps `failed` until the new trainer has its lineage, which is no second failure
        if info.state == "failed" and info.lineage != failed_lineage:
            raise ChildError(f"the run failed: {info.state_reason or 'no reason was given'}")
        await on_run(info)
        await asyncio.sleep(POLL_INTERVAL_S)


def _recent(client: BufferClient, step: int) -> Values:
    first = max(1, step - NUM_RECENT + 1)
    return client.curves(names=list(FACTS), from_step=first, to_step=max(1, step)).values


def progress_line(info: RunInfo, stats: Stats, state: str, recent: Values, num_steps: int, step_s: float | None) -> str:
    """Return a line about how far the run is; unknown values are left out.

    Args:
        state: `RunSummary.state`.
        recent: metric of FACTS -> its values in the newest steps.
        step_s: mean seconds per step of this lineage so far, for the ETA; None: no ETA.
    """
    pending = next((item for item in info.evals if item.state == "pending" and not item.abandoned), None)
    # nothing is trained meanwhile, or no more
    is_outside = info.step in (0, num_steps) or info.state == "stopping"
    if pending is not None:
        what = "the starting model" if pending.version == str(START) else f"version {pending.version}"
        doing = f"evaluating {what}, {pending.num_done} of {pending.num_prompts} held-out prompts"
        state = doing if is_outside and state in ("waiting", "learning") else f"{state}  {doing}"
    facts = [f"step {info.step}/{num_steps}", state, *_batch_facts(recent)]
    done = [item for item in info.evals if item.state == "done" and not item.abandoned]
    newest = max(done, key=lambda item: item.finished_at_s or 0.0, default=None)
    if newest is not None and newest.accuracy is not None:
        facts.append(f"held-out accuracy {newest.accuracy:.3f}")
    if (rates := stats.rates) is not None:
        facts.append(f"rollouts/s {rates.generated_per_s:.0f} generated {rates.trained_per_s:.0f} trained")
    if step_s is not None and not is_outside:
        facts.append(f"ETA {duration(step_s * (num_steps - info.step))}")
    if info.waits and (info.step == 0 or state == "waiting"):
        waits = dict.fromkeys(f"{wait.kind or wait.owner}: {wait.name}" for wait in info.waits)
        facts.append(f"waits: {', '.join(waits)}")
    return "  ".join(facts)


def _batch_facts(recent: Values) -> Iterator[str]:
    for name, text in FACTS.items():
        values = recent.get(name) or [None]
        if values[-1] is not None:
            yield text.format(values[-1])
        if name == "reward_mean" and len(known := [value for value in values if value is not None]) > 1:
            yield f"mean of {len(known)} steps {fmean(known):.3f}"


def duration(seconds: float) -> str:
    """Return a duration as `1:05` or `1:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
