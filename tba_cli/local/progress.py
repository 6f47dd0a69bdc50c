"""Poll a run through the buffer service, and show its progress: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TextIO

from tba.api import LedgerEntry, RunInfo, Stats
from tba.clients import BufferClient
from tba.errors import ChildError, UnavailableError
from tba_cli.console import Console
from tba_cli.reports.history import Poll
from tba_cli.reports.ledger import batch_entries, ledger_lines
from tba_cli.reports.outputs import failures_line
from tba_cli.run_folder import RunFolder

POLL_INTERVAL_S = 1.0
PLAIN_INTERVAL_S = 5.0
RATE_WINDOW_S = 20.0
ADVICE_INTERVAL_S = 5.0


class RunWatcher:
    """Polls the run about once a second, keeps polls.jsonl, shows the progress.

    Waits for the state of the run to become `done` or `failed`. The whole wait has no deadline but the run itself; the
    deadline of silence is `silence_s` (wait `buffer-poll`).

    Args:
        on_run: called with the run after every poll, until it is over.
        on_news: called with a line: what the run calls for, when that lasts and was not said before; or scores that
            failed, the first time and with every ten times as many.
    """

    def __init__(
        self,
        client: BufferClient,
        folder: RunFolder,
        view: ProgressView,
        *,
        num_steps: int,
        silence_s: float,
        on_run: Callable[[RunInfo], Awaitable[None]],
        on_news: Callable[[str], None],
    ) -> None:
        self._client = client
        self._folder = folder
        self._view = view
        self._tracker = ProgressTracker(num_steps)
        self._silence_s = silence_s
        self._on_run = on_run
        self._on_news = on_news
        self._num_failed = 0
        self._news = AdviceNews()
        self._advised_at_s = time.monotonic()
        self._num_lines = 0
        self._last_entry: LedgerEntry | None = None

    async def until_over(self, *, failed_lineage: int | None = None) -> RunInfo:
        """Poll until the run is done.

        Args:
            failed_lineage: the lineage whose failure is being resumed: the run stays `failed` until the trainer has
                taken a new one.

        Raises:
            ChildError: the run failed, or the buffer service was silent for too long.
        """
        answered_at_s = time.monotonic()
        with self._folder.polls_path.open("a", encoding="utf-8") as polls:
            while True:
                try:
                    info, progress, news = await asyncio.to_thread(self._poll, polls)
                    answered_at_s = time.monotonic()
                except UnavailableError as error:
                    if time.monotonic() - answered_at_s > self._silence_s:
                        raise ChildError(
                            f"wait 'buffer-poll': no answer for {self._silence_s:.0f} s: {error}"
                        ) from None
                    await asyncio.sleep(POLL_INTERVAL_S)
                    continue
                self._view.show(progress)
                for line in news:
                    self._on_news(line)
                if info.state == "done":
                    return info
                # the buffer keeps `failed` until the new trainer has its lineage, which is no second failure
                if info.state == "failed" and info.lineage != failed_lineage:
                    raise ChildError(f"the run failed: {info.state_reason or 'no reason was given'}")
                await self._on_run(info)
                await asyncio.sleep(POLL_INTERVAL_S)

    def _poll(self, polls: TextIO) -> tuple[RunInfo, Progress, list[str]]:
        info, stats = self._client.run(), self._client.stats()
        new_lines = list(ledger_lines(self._client, after=self._num_lines))
        self._num_lines += len(new_lines)
        self._last_entry = next(reversed(batch_entries(new_lines)), self._last_entry)
        poll = Poll(
            at_s=time.time(),
            step=info.step,
            generated=stats.rollouts_generated or 0,
            trained=stats.rollouts_trained or 0,
            stored=stats.num_rollouts,
        )
        polls.write(poll.model_dump_json() + "\n")
        # a kill then cuts short at most one line, which load_polls leaves out
        polls.flush()
        news = list[str]()
        if stats.num_failed >= max(1, 10 * self._num_failed):
            self._num_failed = stats.num_failed
            news.append(failures_line(stats.num_failed, [item.example for item in stats.failed_reasons]))
        # until there is a rollout, the waits of the start call for nothing but patience
        if stats.rollouts_generated and time.monotonic() - self._advised_at_s >= ADVICE_INTERVAL_S:
            advice = self._news.of(self._client.summary().advice)
            news += [] if advice is None else [f"advice: {advice}"]
            self._advised_at_s = time.monotonic()
        return info, self._tracker.make(poll, info, stats, self._last_entry), news


class AdviceNews:
    """Tells which advice is worth a line: what is the same twice in a row and was not said, but for its numbers.

    A share that has changed by about a quarter makes it new.
    """

    def __init__(self) -> None:
        self._last: str | None = None
        self._said: set[str] = set()

    def of(self, advice: str | None) -> str | None:
        """Return the advice if it is worth a line."""
        quarters = re.sub(r"(\d+) %", lambda found: "%" * round(int(found[1]) / 25), advice or "")
        kind = re.sub(r"\d[\d,.]*", "", quarters)
        lasts, self._last = kind == self._last, kind
        if advice is None or not lasts or kind in self._said:
            return None
        self._said.add(kind)
        return advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The run at one moment; None stands for unknown. Rates are per second, over the last 20 s."""

    at_s: float
    step: int
    num_steps: int
    state: str
    waits: tuple[str, ...] = ()
    reward: float | None = None
    accuracy: float | None = None
    heldout_accuracy: float | None = None
    policy_age: float | None = None
    generated_per_s: float | None = None
    trained_per_s: float | None = None
    eta_s: float | None = None


class ProgressTracker:
    """Makes the progress of polls, with rates over a sliding window.

    Args:
        num_steps: optimizer steps of the run.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._window: deque[Poll] = deque()
        self._lineage = 0

    def make(self, poll: Poll, info: RunInfo, stats: Stats, last: LedgerEntry | None) -> Progress:
        """Return the progress after one more poll; `last` is the newest ledger entry."""
        if info.lineage != self._lineage:  # a resume or a rollback went back some steps, which says nothing of the pace
            self._window.clear()
            self._lineage = info.lineage
        self._window.append(poll)
        # a rate needs two polls, however old the first one is
        while len(self._window) > 2 and poll.at_s - self._window[0].at_s > RATE_WINDOW_S:
            self._window.popleft()
        metrics = {} if last is None else last.metrics
        done = [item for item in info.evals if item.state == "done" and not item.abandoned]
        newest = max(done, key=lambda item: item.finished_at_s or 0.0, default=None)
        steps_per_s = self._rate("step")
        return Progress(
            at_s=poll.at_s,
            step=info.step,
            num_steps=self._num_steps,
            state=info.state,
            waits=tuple(f"{wait.owner}: {wait.name}" for wait in info.waits),
            reward=metrics.get("reward_mean", stats.mean_reward_recent),
            accuracy=metrics.get("accuracy"),
            heldout_accuracy=None if newest is None else newest.accuracy,
            policy_age=metrics.get("policy_age_mean"),
            generated_per_s=self._rate("generated"),
            trained_per_s=self._rate("trained"),
            eta_s=(self._num_steps - info.step) / steps_per_s if steps_per_s else None,
        )

    def _rate(self, counter: str) -> float | None:
        first, last = self._window[0], self._window[-1]
        passed_s = last.at_s - first.at_s
        return (getattr(last, counter) - getattr(first, counter)) / passed_s if passed_s > 0 else None


def describe(progress: Progress, *, with_step: bool = True) -> str:
    """Return one line, which leaves out what is unknown."""
    facts = [f"step {progress.step}/{progress.num_steps}"] if with_step else []
    if progress.state != "running":
        facts.append(progress.state)
    if progress.reward is not None:
        facts.append(f"reward {progress.reward:.3f}")
    accuracy = "" if progress.accuracy is None else f"train {progress.accuracy:.3f}"
    heldout = "" if progress.heldout_accuracy is None else f"held out {progress.heldout_accuracy:.3f}"
    if accuracy or heldout:
        facts.append("accuracy " + " ".join(filter(None, (accuracy, heldout))))
    if progress.policy_age is not None:
        facts.append(f"age {progress.policy_age:.1f}")
    if progress.generated_per_s is not None and progress.trained_per_s is not None:
        facts.append(f"rollouts/s {progress.generated_per_s:.0f} generated {progress.trained_per_s:.0f} trained")
    if with_step and progress.eta_s is not None:
        facts.append(f"ETA {duration(progress.eta_s)}")
    if progress.step == 0 and progress.waits:
        facts.append("waits: " + ", ".join(progress.waits))
    return "  ".join(facts)


def duration(seconds: float) -> str:
    """Return a duration as `1:05` or `1:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressView(Protocol):
    """Shows progress within a `with` block."""

    def __enter__(self) -> ProgressView:
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        ...

    def show(self, progress: Progress) -> None:
        """Show the progress now."""
        ...


class PlainProgress:
    """Prints one line every 5 s; nothing when quiet."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at_s = float("-inf")
        self._shown_step = -1

    def __enter__(self) -> PlainProgress:
        """Return itself; there is nothing to begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing; there is nothing to end."""

    def show(self, progress: Progress) -> None:
        """Print a line if the last one is 5 s old, or if this is the last step."""
        is_last = progress.step == progress.num_steps and self._shown_step != progress.step
        if is_last or progress.at_s - self._shown_at_s >= PLAIN_INTERVAL_S:
            self._shown_at_s, self._shown_step = progress.at_s, progress.step
            self._console.info(describe(progress))


class LiveProgress:
    """A rich progress bar; lines printed meanwhile appear above it."""

    def __init__(self, console: Console, num_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            TextColumn("step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            TextColumn("{task.fields[facts]}"),
            console=console.rich,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("step", total=num_steps, facts="starting", eta="-:--")

    def __enter__(self) -> LiveProgress:
        """Draw the bar."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def show(self, progress: Progress) -> None:
        """Move the bar."""
        eta = "-:--" if progress.eta_s is None else duration(progress.eta_s)
        facts = describe(progress, with_step=False)
        self._progress.update(self._task, completed=progress.step, facts=facts, eta=eta)


def progress_view(console: Console, num_steps: int) -> ProgressView:
    """Return the bar on a terminal, plain lines elsewhere and when quiet."""
    if console.is_terminal and console.loudness != "quiet":
        return LiveProgress(console, num_steps)
    return PlainProgress(console)
