"""`tba.Run`: read and steer a run, live or over, from Python."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from tba.api import (
    EvalInfo,
    LedgerLine,
    RolloutDetail,
    RolloutOrder,
    RunCommand,
    RunInfo,
    RunSummary,
    SettingsInfo,
    SettingsRequest,
    Stats,
    WeightVersionInfo,
)
from tba.clients.buffer import Command as StateCommand
from tba.clients.run_reader import RolloutFilters
from tba.config import parse_live
from tba.errors import ConfigError, UnavailableError, WaitTimeoutError
from tba_cli.reports.ledger import active_steps, ledger_lines, lineage_tree
from tba_cli.scripting.connection import Connection
from tba_cli.scripting.tables import Listing, Rollouts, Table

MAX_TEXT_CHARS = 10_000
STEPS_PER_PAGE = 2000
"""The most points that the service gives at once, so that each one is a single step."""
POLL_S = 1.0
_NUMBER = re.compile(r"(\d+)")
AWAY_S = 120.0
"""A service elsewhere that is silent for so long is given up."""
OVER = ("done", "failed")


class Run:
    """A run in progress, or one that is over, which is read through a view that changes nothing.

    The first call that needs the view starts it (seconds), later calls share it, and `close()`, the end of a `with`
    block or of the interpreter ends it. Every call raises ServiceError subclasses where the service says no or is away.

    Args:
        name: a name below runs/, or the path of a run folder; None: the newest run.
        url: of the buffer service of a run elsewhere, instead of a name.
        token: of the operator or a viewer, with `url`.
        ca_file: PEM file of the authorities that are trusted for an https URL.

    Raises:
        ConfigError: there is no such run.

    Examples:
        >>> with tba.Run("quickstart-seed0") as run:
        ...     frame = run.metrics().to_pandas()
        >>> live = tba.Run(url="https://buffer:8700", token=token)
    """

    def __init__(
        self,
        name: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        if name is not None and url is not None:
            raise ConfigError(f"give either the name of a run here ({os.fspath(name)!r}) or url={url!r}, not both")
        if url is None and token is not None:
            raise ConfigError("token goes with url: a run here has its tokens in its folder")
        self._connection = Connection(name, url=url, token=token, ca_file=ca_file)

    def __enter__(self) -> Run:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return which run it is; nothing is asked."""
        if self.path is None:
            return f"tba.Run(url={self._connection.url!r})"
        return f"<tba.Run {self.path.name!r} in {self.path.parent}, {'over' if self.is_over else 'in progress'}>"

    def close(self) -> None:
        """End the view and the connections; a later call opens them again."""
        self._connection.close()

    # ---- Where it stands ----

    @property
    def path(self) -> Path | None:
        """The run folder; None: the run is elsewhere."""
        folder = self._connection.folder
        return None if folder is None else folder.path

    @property
    def is_over(self) -> bool:
        """Whether nothing works on it any more: it is done, has failed, was stopped or killed."""
        if self._connection.folder is not None:
            return self._connection.is_over
        return self.info.state in OVER

    @property
    def info(self) -> RunInfo:
        """State, versions, components, waits and evaluations, as they are now."""
        return self._connection.client().run()

    def summary(self) -> RunSummary:
        """Return in sentences what the run does, how it learns, what waits for what, and what to try."""
        return self._connection.client().summary()

    def stats(self) -> Stats:
        """Return the counts of the buffer."""
        return self._connection.client().stats()

    @property
    def url(self) -> str:
        """The address of the buffer service, or of the view."""
        return self._connection.client().base_url

    def view(self) -> str:
        """Return the address of the page of the run. It holds a token: show it to nobody who may not steer the run."""
        return self._connection.page()

    # ---- What it made ----

    def metrics(self) -> Table:
        """Return the metrics of every step of the active history: `lineage`, `step`, `at_s` (Unix seconds), and a
        column per metric (docs/trainer.md); None: the step does not know it.

        Examples:
            >>> run.metrics().to_pandas().plot(x="step", y="reward_mean")
        """
        client = self._connection.client()
        info, lineage = client.run(), None
        steps, at_s, metrics = [], [], {}
        # a resume meanwhile has abandoned some of the steps that were read
        while lineage != info.lineage:
            lineage, steps, at_s, metrics = info.lineage, [], [], {}
            for first in range(1, info.step + 1, STEPS_PER_PAGE):
                last = min(first + STEPS_PER_PAGE - 1, info.step)
                curves = client.curves(from_step=first, to_step=last, max_points=STEPS_PER_PAGE)
                for name in metrics.keys() | curves.values.keys():
                    values = curves.values.get(name) or [None] * len(curves.steps)
                    metrics.setdefault(name, [None] * len(steps)).extend(values)
                steps += curves.steps
                at_s += curves.at_s
            info = client.run()
        ways = active_steps(lineage_tree(info.parents), lineage=info.lineage, step=info.step)
        lineages = [next(number for number, way in ways.items() if step in way) for step in steps]
        columns = {name: metrics[name] for name in sorted(metrics, key=_with_numbers)}
        return Table({"lineage": lineages, "step": steps, "at_s": at_s, **columns})

    def rollouts(
        self, *, order: RolloutOrder = "oldest", text_chars: int = MAX_TEXT_CHARS, **filters: Unpack[RolloutFilters]
    ) -> Rollouts:
        """Return the stored rollouts that match; nothing is read before it is iterated or made a table.

        Args:
            order: oldest, newest, best or worst.
            text_chars: longer texts are cut in the iteration (at most 10,000); `rollout(id)` has the whole ones.
            filters: prompt_id, task, version, from_version, to_version, status, min_reward, max_reward, searcher_id,
                finish_reason, contains.

        Examples:
            >>> for rollout in run.rollouts(order="best", task="addition").head(3):
            ...     print(rollout.reward, rollout.prompt_text, rollout.response_text)
            >>> frame = run.rollouts(status="scored", min_reward=1.0).to_pandas()
        """
        return Rollouts(self._connection.client, order=order, text_chars=text_chars, filters=filters)

    def rollout(self, rollout_id: str) -> RolloutDetail:
        """Return one rollout with its tokens, log-probs, gold data, reward parts and the steps that trained it.

        Args:
            rollout_id: as `rollouts()` and the page show it.

        Raises:
            NotFoundError: no stored rollout has this id.

        Examples:
            >>> worst = run.rollout(run.rollouts(order="worst").head(1)[0].rollout_id)
            >>> list(zip(worst.token_texts or [], worst.sampler_logprobs))
        """
        return self._connection.client().get_rollout(rollout_id)

    def ledger(self) -> Listing[LedgerLine]:
        """Return the ledger: which rollouts each step consumed (LedgerEntry), and the starts of trainers (ResumeEntry);
        abandoned steps too.

        Examples:
            >>> frame = run.ledger().to_pandas()
        """
        return Listing(lambda: ledger_lines(self._connection.client()))

    def evaluations(self) -> list[EvalInfo]:
        """Return the evaluations, those in work too."""
        return self.info.evals

    @property
    def versions(self) -> list[WeightVersionInfo]:
        """The newest weight versions that the object store has, the newest first."""
        return self._connection.client().list_versions().versions

    # ---- Steering ----

    def pause(self, reason: str | None = None) -> RunInfo:
        """Pause it: no new leases, no new batches.

        Args:
            reason: kept in the audit.
        """
        return self._command("pause", reason)

    def resume(self, reason: str | None = None) -> RunInfo:
        """Continue after a pause. (A run that is over continues with `tba.run(..., resume=True)`.)

        Args:
            reason: kept in the audit.
        """
        return self._command("resume", reason)

    def stop(self, reason: str | None = None) -> RunInfo:
        """Stop it for good: the step under way is finished, and the run is evaluated and written up.

        Args:
            reason: kept in the audit.
        """
        return self._command("stop", reason)

    def set(self, *, reason: str | None = None, **settings: Any) -> SettingsInfo:
        """Change live settings: learning_rate, beta, most_on_policy_prob, sampling_temperature, eval_every_steps.

        Args:
            reason: kept in the audit.
            settings: a number, a schedule such as {"kind": "linear", "value": 0.1, "final": 0.01, "steps": 400}, or
                None: as the recipe says.

        Raises:
            ConfigError: a name or value is wrong.

        Examples:
            >>> run.set(learning_rate=1e-4, reason="spikes")
        """
        request = SettingsRequest(settings=parse_live(settings), reason=reason)
        return self._connection.client().change_settings(request)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over.

        Args:
            timeout_s: None: no deadline.

        Raises:
            WaitTimeoutError: it is not, after `timeout_s`.
        """
        began_s = answered_s = time.monotonic()
        while True:
            try:
                if self.is_over:
                    return
                answered_s = time.monotonic()
            except UnavailableError:  # a service elsewhere may restart meanwhile
                if time.monotonic() - answered_s > AWAY_S:
                    raise
            left_s = None if timeout_s is None else began_s + timeout_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise WaitTimeoutError(f"wait 'run-over': {self!r} is not over after {timeout_s:g} s; wait longer")
            time.sleep(POLL_S if left_s is None else min(POLL_S, left_s))

    def _command(self, name: StateCommand, reason: str | None) -> RunInfo:
        return self._connection.client().command(name, RunCommand(reason=reason))


def _with_numbers(name: str) -> list[str | int]:
    """Return a key that sorts names by the numbers in them: columns of ages stand by age."""
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(name)]
