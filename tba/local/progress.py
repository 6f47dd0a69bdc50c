"""Progress of a run for people: a live bar on a terminal, one plain line every few seconds elsewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from tba.api import LedgerEntry, RunInfo, Stats
from tba.local.console import Console
from tba.local.history import Poll

PLAIN_INTERVAL_S = 5.0
RATE_WINDOW_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run at one moment; None is unknown so far. Rates are per second, over the last 20 s."""

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


class SnapshotMaker:
    """Turns polls into snapshots, with rates over a sliding window.

    Args:
        num_steps: optimizer steps of the run.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._window: deque[Poll] = deque()

    def make(self, poll: Poll, info: RunInfo, stats: Stats, last: LedgerEntry | None) -> Snapshot:
        """The snapshot after one more poll; `last` is the newest ledger entry."""
        self._window.append(poll)
        while len(self._window) > 2 and poll.at_s - self._window[0].at_s > RATE_WINDOW_S:
            self._window.popleft()
        metrics = {} if last is None else last.metrics
        done = [item for item in info.evals if item.state == "done"]
        newest = max(done, key=lambda item: item.finished_at_s or 0.0, default=None)
        steps_per_s = self._rate("step")
        return Snapshot(
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


def describe(snapshot: Snapshot, *, with_step: bool = True) -> str:
    """One line, without what is unknown."""
    facts = [f"step {snapshot.step}/{snapshot.num_steps}"] if with_step else []
    if snapshot.state != "running":
        facts.append(snapshot.state)
    if snapshot.reward is not None:
        facts.append(f"reward {snapshot.reward:.3f}")
    accuracy = "" if snapshot.accuracy is None else f"train {snapshot.accuracy:.3f}"
    heldout = "" if snapshot.heldout_accuracy is None else f"held out {snapshot.heldout_accuracy:.3f}"
    if accuracy or heldout:
        facts.append("accuracy " + " ".join(filter(None, (accuracy, heldout))))
    if snapshot.policy_age is not None:
        facts.append(f"age {snapshot.policy_age:.1f}")
    if snapshot.generated_per_s is not None and snapshot.trained_per_s is not None:
        facts.append(f"rollouts/s {snapshot.generated_per_s:.0f} generated {snapshot.trained_per_s:.0f} trained")
    if with_step and snapshot.eta_s is not None:
        facts.append(f"ETA {duration(snapshot.eta_s)}")
    if snapshot.step == 0 and snapshot.waits:
        facts.append("waits: " + ", ".join(snapshot.waits))
    return "  ".join(facts)


def duration(seconds: float) -> str:
    """`1:05` or `1:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressView(Protocol):
    """Shows snapshots between `with` and its end."""

    def __enter__(self) -> ProgressView:
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        ...

    def show(self, snapshot: Snapshot) -> None:
        """Show one more snapshot."""
        ...


class PlainProgress:
    """One line every 5 s; nothing when quiet."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at_s = float("-inf")
        self._shown_step = -1

    def __enter__(self) -> PlainProgress:
        """Nothing to begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""

    def show(self, snapshot: Snapshot) -> None:
        """Print a line, if the last one is 5 s old or this is the last step."""
        is_last = snapshot.step == snapshot.num_steps and self._shown_step != snapshot.step
        if is_last or snapshot.at_s - self._shown_at_s >= PLAIN_INTERVAL_S:
            self._shown_at_s, self._shown_step = snapshot.at_s, snapshot.step
            self._console.say(describe(snapshot))


class LiveProgress:
    """A rich progress bar; lines printed meanwhile appear above it."""

    def __init__(self, console: Console, num_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
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

    def show(self, snapshot: Snapshot) -> None:
        """Move the bar."""
        eta = "-:--" if snapshot.eta_s is None else duration(snapshot.eta_s)
        facts = describe(snapshot, with_step=False)
        self._progress.update(self._task, completed=snapshot.step, facts=facts, eta=eta)


def progress_view(console: Console, num_steps: int) -> ProgressView:
    """The bar on a terminal, plain lines elsewhere and when quiet."""
    if console.is_terminal and console.loudness != "quiet":
        return LiveProgress(console, num_steps)
    return PlainProgress(console)
