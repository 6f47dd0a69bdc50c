"""Name the state that a run is in, and say it in sentences: its evidence, how the run learns, and what to try.

A pure function of the answers to GET /v1/run, /v1/stats and /v1/curves, so that page and commands say the same. A run
is in the first state of STATES that has evidence. Where the numbers do not tell, the sentences stay silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import copysign, inf, nan, sqrt
from statistics import fmean, median, variance

from tba.api import Curves, EvalInfo, RunInfo, RunSummary, Stats, WaitInfo
from tba.config import Recipe
from tba.config.trainer import REMEDIES, EssCollapseSection
from tba.versions import START

CURVE_NAMES = (
    *("reward_mean", "accuracy", "frac_reward_zero_std", "completions/clipped_ratio", "num_rollouts"),
    *("num_unique_rollouts", "entropy", "ess", "policy_age_mean", "wait_s", "step_s"),
    *("completions/mean_length", "learning_rate"),
)
"""The metrics that the sentences read."""
NUM_POINTS = 300
"""As many as the page plots: the first value that a sentence names is the first one of the curve below it."""
NUM_RECENT = 10
"""How many points at the end of a curve are its present. As many at its start, or before them, are compared."""
MIN_POINTS = 3
"""One batch may be odd: shares of batches are evidence from so many points on."""
SURE, UNSURE = 3.0, 1.0
"""Two means differ for sure if they are as many standard errors apart; below the second number nothing has changed."""
MIN_WAIT_S = 5.0
"""Shorter waits are normal, and are not reported."""
UNUSUAL_WAIT = 3.0
"""A trainer that waits for data before every step stands still only after as many times its usual wait."""
MIN_FAILED_SHARE = 0.1
"""A smaller share of failed scores is normal: a scorer may abstain, or an answer may be too long."""
MIN_SCORED = 64
"""With fewer stored rewards, equal ones may be chance."""
REWARD_LEFT = 0.5
"""The reward has fallen if less than this share of its best mean is left, counted from 0 or a lower lowest value."""
ENTROPY_FACTOR, ENTROPY_NATS = 2.0, 1.0
"""Entropy may rise in training; by this factor, and by as many nats per token, it does where words become noise. Where
the reward rises with it, as from a model that always said the same, it is no decay."""
EMPTY_TOKENS = 1.5
"""An answer of one token is the end of the sequence alone; they became empty if at first they had twice as many."""
MIN_CUT_SHARE = 0.75
SOLVED_SHARE = 0.9
TIED_SHARE = 0.9
"""Runs that learned well had 0.8 of their groups tied."""
SAME_SHARE = 0.05
"""A solved batch of 32 groups of 4 has about a quarter of different answers; a policy that says one thing has one."""
FLAT_STEPS = 50
"""Fewer steps without a rise are no evidence: runs of SmolLM2 that learned needed 20 to 30 for one."""
STARVED_SHARE = 0.5
REMEDY_OF_WAIT = {
    "no-version": "Look at the trainer: it has not published yet.",
    "no-prompts": "Upload prompts (`tba prompts upload`).",
    "unscored": "Look at the reward service: rewards of stored rollouts are unknown.",
    "reward-workers": "Give the reward service more workers (`reward.num_workers`) or replicas.",
    "reward-unreachable": "Start the reward service, or correct its URL (`tba doctor`); or its scorer hangs (its log).",
    "reward": "Start the reward service, or correct its URL (`tba doctor`).",
    "scorer-away": "Look at the scorer's endpoint or model (`tba doctor`).",
    "buffer-unreachable": "Look at the network between searchers and buffer (`tba doctor`).",
    "environment-failing": "Look at the environment: the log of the searchers has its errors.",
    "batch": "Look at the buffer: it does not answer the trainer's request for a batch.",
    "unpublished-versions": "Look at the object store, or publish less often (`trainer.sync_interval`).",
    **dict.fromkeys(("object-store", "checkpoint-download", "checkpoint-upload"), "Look at the store (`tba doctor`)."),
}
"""Name of a wait -> what to try; docs/operations.md explains every wait."""
WAITS_FOR_ROLLOUTS = ("rollouts", "recent", "samples-per-insert", "used-up")
SCORING_WAITS = ("reward-workers", "unscored")
"""Searchers wait for slow scorers as a matter of course; that matters where the trainer starves."""

Finding = tuple[str, str | None]
"""The evidence and the remedy, a sentence each; None: nothing has to change."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What is known of a run."""

    info: RunInfo
    stats: Stats
    curves: Curves
    recipe: Recipe | None = None

    @property
    def is_over(self) -> bool:
        return self.info.read_only or self.info.state in ("done", "failed")

    @property
    def reason(self) -> str:
        return (self.info.state_reason or "no reason was given").rstrip(".")

    def known(self, name: str) -> list[float]:
        """Return the known values of a metric, oldest first."""
        return [value for value in self.curves.values.get(name, []) if value is not None]

    def lately(self, name: str, min_points: int = MIN_POINTS) -> float | None:
        """Return the mean of a metric over the newest points; None: fewer than `min_points` of these know it."""
        recent = [value for value in self.curves.values.get(name, [])[-NUM_RECENT:] if value is not None]
        return fmean(recent) if len(recent) >= min_points else None

    @property
    def now_rate(self) -> str:
        """The present learning rate, to be said behind the words."""
        rates = self.known("learning_rate")
        return f" (now {rates[-1]:.3g})" if rates else ""

    @property
    def is_solved(self) -> bool:
        """Whether nearly all answers succeed, also on held-out prompts where these were evaluated."""
        held_out = next((item.accuracy for item in reversed(self.evals) if item.version != str(START)), 1.0)
        return min(self.lately("accuracy") or 0.0, held_out or 0.0) >= SOLVED_SHARE

    @property
    def evals(self) -> list[EvalInfo]:
        """The finished evaluations of the active history, oldest first."""
        done = [each for each in self.info.evals if each.state == "done" and not each.abandoned]
        return [each for each in done if each.accuracy is not None]

    @property
    def rise(self) -> float:
        """By how many standard errors the mean reward has risen; NaN, which is not in any range: too few points."""
        rewards = self.known("reward_mean")
        if len(rewards) < 2 * NUM_RECENT:
            return nan
        # what is learned within a few steps is seen beside the first point alone
        return max(_errors_apart(before, rewards[-NUM_RECENT:]) for before in (rewards[:NUM_RECENT], rewards[:1]))


def _errors_apart(before: Sequence[float], now: Sequence[float]) -> float:
    """Return how many standard errors the mean of `now` is above that of `before`."""
    found, spread = fmean(now) - fmean(before), variance(now)
    error = sqrt(spread / len(now) + (variance(before) if len(before) > 1 else spread) / len(before))
    return found / error if error else copysign(inf, found) if found else 0.0


# ---- The states: each function returns its evidence and its remedy, or None -----------------------------------------


def _failed(run: _Run) -> Finding | None:
    remedy = "Remove the cause, then continue from the last checkpoint (`tba run --resume`)."
    return (f"It failed: {run.reason}.", remedy) if run.info.state == "failed" else None


def _failing_scores(run: _Run) -> Finding | None:
    stats = run.stats
    share = stats.num_failed / max(1, stats.num_failed + stats.num_scored)
    if share < MIN_FAILED_SHARE:
        return None
    why = f", most often with the reason {stats.failed_reasons[0].example!r}" if stats.failed_reasons else ""
    return (
        f"{100 * share:.0f} % of the stored rollouts have no score ({stats.num_failed:,} failed){why}.",
        "Compare their data with what the scorer needs (Rollouts, Failed; `tba config check`).",
    )


def _waiting(run: _Run) -> Finding | None:
    info, usual_s = run.info, run.lately("wait_s", 1) or 0.0
    if run.is_over:
        return None
    if info.state != "running":
        remedy = "Resume it (`tba resume`)." if info.state == "paused" else None
        return f"The run is {info.state} ({run.reason}).", remedy
    if info.loss is not None:
        return "Redis has lost data and takes no more.", "Restore it, or accept the loss (`tba buffer accept-loss`)."
    if info.note is not None:
        return "No trainer is there.", "Look at its log, and start it again."
    waits = [wait for wait in info.waits if wait.name != "batch"]
    if not any(wait.kind == "trainer" for wait in waits):
        waits = info.waits  # else the buffer has the request for a batch, and names what the batch waits for
    # the trainer's first: while it waits nothing is learned
    for wait in sorted(waits, key=lambda wait: (wait.kind != "trainer", -wait.for_s)):
        is_trainer, remedy = wait.kind == "trainer", _remedy_of_wait(run, wait)
        min_s = max(MIN_WAIT_S, UNUSUAL_WAIT * usual_s) if is_trainer else MIN_WAIT_S
        # searchers that wait for the trainer do no harm
        if wait.for_s >= min_s and (is_trainer or (remedy and wait.name not in SCORING_WAITS)):
            left = f"at most {max(0.0, wait.deadline_in_s):.0f} s more"
            return f"{wait.owner} waits for '{wait.name}' since {wait.for_s:.0f} s ({left}).", remedy
    return None if run.curves.num_steps else ("The first step is awaited.", None)


def _remedy_of_wait(run: _Run, wait: WaitInfo) -> str | None:
    if wait.name not in WAITS_FOR_ROLLOUTS:
        return REMEDY_OF_WAIT.get(wait.name)
    # the first rollouts take their time
    return _more_rollouts(run) if run.curves.num_steps else None


def _more_rollouts(run: _Run) -> str:
    """Return how the trainer gets more rollouts. More searchers are advised only where there is room for them."""
    reuse = "use rollouts more often (lower `most_on_policy_prob`; raise `sampling.samples_per_insert`, `max_uses`)."
    idle_cores = next((item.gauges.get("idle_cores") for item in run.info.components if item.kind == "buffer"), None)
    for wait in run.info.waits:
        if wait.name in SCORING_WAITS and wait.for_s >= MIN_WAIT_S:
            return REMEDY_OF_WAIT[wait.name]
    if not any(item.kind == "searcher" and item.alive for item in run.info.components):
        return "Start searchers, or look at their logs: none is alive."
    if idle_cores is not None and idle_cores >= 1:
        return f"Add searchers (`tba scale`): {idle_cores:.0f} cores of the machine are idle."
    if run.info.searchers is not None and run.info.searchers.backend == "kubernetes":
        return f"Add searchers (`tba scale`), or {reuse}"
    return f"U{reuse[1:]}" if idle_cores is None else f"No core of the machine is idle for more searchers, so {reuse}"


def _collapsing(run: _Run) -> Finding | None:
    signs, rewards, entropies = [], run.known("reward_mean"), run.known("entropy")
    parts = [rewards[max(0, end - NUM_RECENT) : end] for end in range(len(rewards), NUM_RECENT - 1, -NUM_RECENT)]
    if parts:
        parts.append(rewards[:MIN_POINTS])  # far too high a learning rate breaks a policy within a few steps
    best, low = max(parts, key=fmean, default=[]), min([0.0, *rewards])
    if best and _errors_apart(best, parts[0]) < -SURE and fmean(parts[0]) - low < REWARD_LEFT * (fmean(best) - low):
        signs.append(f"the mean reward fell from {fmean(best):.3g} to {fmean(parts[0]):.3g}")
    entropy, first = run.lately("entropy"), entropies[0] if entropies else 0.0
    if entropy is not None and entropy > max(ENTROPY_FACTOR * first, first + ENTROPY_NATS) and not run.rise >= SURE:
        signs.append(f"entropy rose from {first:.2g} to {entropy:.2g} nats per token")
    lengths = run.known("completions/mean_length")
    before, now = fmean(lengths[:MIN_POINTS] or [0.0]), median(lengths[-MIN_POINTS:] or [0.0])
    # where a short answer is right, the reward is none the worse
    if now <= EMPTY_TOKENS < before / 2 and rewards and fmean(rewards[-MIN_POINTS:]) <= fmean(rewards[:MIN_POINTS]):
        signs.append(f"they became empty (from {before:.0f} tokens to {now:.0f})")
    alarms = f" Alarms that are on: {', '.join(on)}." if (on := _alarms_on(run)) else ""
    return (f"The answers decay: {', and '.join(signs)}.{alarms}", f"{_go_back(run)}.") if signs else None


def _go_back(run: _Run) -> str:
    return (
        "Go back to a version from before (`tba rollback`, `tba run --fork`) or begin anew, with a larger "
        f"`objective.beta` or a lower learning rate{run.now_rate}"
    )


def _alarms_on(run: _Run) -> list[str]:
    """Return the alarms that are on, or were when the run was done; those of a run that was killed say nothing."""
    gauges = [item.gauges for item in run.info.components if not run.is_over or run.info.state == "done"]
    return [name for name in REMEDIES if any(each.get(f"alarm_on_{name}") for each in gauges)]


def _alarm(run: _Run) -> Finding | None:
    ess, on = run.lately("ess"), _alarms_on(run)
    if ess is not None and ess < EssCollapseSection.MIN_ESS:
        name, found = "ess_collapse", f"A few rollouts rule the batch: the effective sample size is {ess:.2f}"
    elif on and not (run.is_over and (run.is_solved or run.rise >= SURE)):
        name, found = on[0], f"The alarm {on[0]} {'was' if run.is_over else 'is'} on"
    else:
        return None
    tied = run.known("frac_reward_zero_std")[-MIN_POINTS:]
    if len(tied) == MIN_POINTS and min(tied) == 1.0 and not run.is_solved:  # another rate moves it no more
        return f"{found}, and now in every group all rewards are equal: it learns nothing.", f"{_go_back(run)}."
    remedy = REMEDIES[name].replace("lower the learning rate", f"lower the learning rate{run.now_rate}", 1)
    if run.recipe is not None and run.recipe.trainer.sync_interval == 1:  # no lower one
        remedy = remedy.replace(", or lower trainer.sync_interval", "").replace(" or trainer.sync_interval", "")
    if run.recipe is not None and run.recipe.sampling.most_on_policy_prob == 1.0:
        remedy = remedy.replace(" or most_on_policy_prob", "")
    return f"{found}.", f"{remedy[0].upper()}{remedy[1:]}."


def _cut_off(run: _Run) -> Finding | None:
    share = run.lately("completions/clipped_ratio")
    # answers of a fixed length are always cut, and teach all the same
    if share is None or share < MIN_CUT_SHARE or run.is_solved or run.rise >= SURE:
        return None
    if run.recipe is not None and run.recipe.environments:
        return (
            f"{100 * share:.0f} % of the episodes end as truncated.",
            "Look at their stop conditions (Rollouts), and raise the limit that most of them name.",
        )
    return (
        f"{100 * share:.0f} % of the answers are cut at the limit of tokens.",
        "Raise `searcher.max_response_tokens`, unless answers of a fixed length are wanted.",
    )


def _flat(run: _Run) -> Finding | None:
    stats, deciles = run.stats, run.stats.stored.reward_deciles if run.stats.stored is not None else None
    tied, num_unique = run.lately("frac_reward_zero_std", NUM_RECENT) or 0.0, run.lately("num_unique_rollouts")
    num, num_steps = run.lately("num_rollouts") or 0.0, run.curves.num_steps
    if run.is_solved:
        return None
    if deciles is not None and deciles[0] == deciles[-1] and stats.num_scored >= MIN_SCORED:
        return (
            f"All {stats.num_scored:,} stored rewards are {deciles[0]:g}, so nothing can be learned.",
            "Compare answers with their gold data (Rollouts), and try the scorer on examples (`tba score`).",
        )
    if tied >= TIED_SHARE and num_unique is not None and num_unique <= max(1.0, SAME_SHARE * num):
        return (
            f"The policy says nearly always the same (distinct answers in a batch of {num:.0f}: {num_unique:.0f}).",
            f"{_go_back(run)}, or another model.",
        )
    if tied >= TIED_SHARE and not run.rise >= SURE:
        return (
            f"In {100 * tied:.0f} % of the groups all rewards are equal, so little can be learned.",
            'Take prompts that are neither too easy nor too hard (`data.selection = "posterior"`), or a scorer that '
            "gives part credit.",
        )
    if min(run.known("frac_reward_zero_std"), default=0.0) == 1.0:
        found = "So far all rewards of a group are equal, so nothing was learned."
        return found, "See what the scorer gives for answers (Rollouts)."
    # rewards of old weights do not tell
    is_old = 2 * (run.lately("policy_age_mean") or 0.0) > num_steps
    if num_steps < FLAT_STEPS or is_old or not run.rise < UNSURE:
        return None
    return (
        f"The mean reward has not risen in {num_steps:,} steps.",
        f"Take a higher learning rate{run.now_rate} or a smaller beta (`tba set`), if the scorer rewards what it "
        "should (Rollouts).",
    )


def _interrupted(run: _Run) -> Finding | None:
    found = "Nothing of this run is alive, and it was not brought to an end.", "Continue it (`tba run --resume`)."
    return found if run.info.read_only and run.info.state != "done" else None


def _starved(run: _Run) -> Finding | None:
    waited, took = run.lately("wait_s"), run.lately("step_s")
    # the first step waits for the start of the searchers
    is_new = len(run.known("wait_s")) <= NUM_RECENT
    if run.is_over or is_new or waited is None or took is None or waited <= STARVED_SHARE * (waited + took):
        return None
    return f"The trainer waits {100 * waited / (waited + took):.0f} % of its time for rollouts.", _more_rollouts(run)


def _solved(run: _Run) -> Finding | None:
    if not run.is_solved:
        return None
    share = 100 * (run.lately("accuracy") or 0.0)
    return f"{share:.0f} % of the answers in a batch succeed.", "Take harder prompts, if there is more to learn."


def _ended(run: _Run) -> Finding | None:
    if run.is_over and "the run was stopped" in run.reason:
        return f"It was stopped at step {run.info.step:,} of {run.info.num_steps or 0:,}.", None
    return (f"It is done: {run.reason}.", None) if run.is_over else None


def _learning(run: _Run) -> Finding | None:
    return "The mean reward has risen." if run.rise >= SURE else "The steps so far show no problem.", None


STATES: tuple[tuple[str, Callable[[_Run], Finding | None]], ...] = (
    # nothing is learned
    ("failed", _failed),
    ("failing-scores", _failing_scores),
    ("waiting", _waiting),
    # something wrong is learned, or too little
    ("collapsing", _collapsing),
    ("alarm", _alarm),
    ("cut-off", _cut_off),
    ("flat", _flat),
    # it could go on, or faster
    ("interrupted", _interrupted),
    ("starved", _starved),
    # all is well
    ("solved", _solved),
    ("ended", _ended),
    ("learning", _learning),
)
"""The states of a run, most urgent first."""


def summarise(info: RunInfo, stats: Stats, curves: Curves, recipe: Recipe | None = None) -> RunSummary:
    """Return the state of the run in sentences.

    Args:
        curves: the curves of CURVE_NAMES, with at most NUM_POINTS points.
        recipe: by which a remedy leaves out what cannot be changed further.
    """
    run = _Run(info, stats, curves, recipe)
    doing, rewards = _doing(info, stats), _rewards(run)
    for state, find in STATES:
        if (found := find(run)) is not None:
            return RunSummary(state=state, doing=doing, learning=rewards, finding=found[0], remedy=found[1])
    raise AssertionError("the last state has evidence in every run")


def _doing(info: RunInfo, stats: Stats) -> str:
    searchers = [item for item in info.components if item.kind == "searcher" and item.alive]
    tokens_per_s = sum(item.gauges.get("tokens_per_s", 0.0) for item in searchers)
    does = {"done": "is done", "failed": "has failed"}.get(info.state, "stands" if info.read_only else "is")
    of = "" if info.num_steps is None else f" of {info.num_steps:,}"
    by = f", and searchers ({len(searchers)} alive) make {tokens_per_s:,.0f} tokens/s" if does == "is" else ""
    return f"The run {does} at step {info.step:,}{of}; {stats.num_rollouts:,} rollouts are stored{by}."


def _rewards(run: _Run) -> str | None:
    curves, rewards = run.curves, run.known("reward_mean")
    if not curves.num_steps:
        return None
    said = "No step knows a reward so far."
    if rewards:
        now, before = rewards[-NUM_RECENT:], rewards[-2 * NUM_RECENT : -NUM_RECENT]
        at = next(i for i, value in enumerate(curves.values["reward_mean"]) if value is not None)
        first, last = curves.first_steps[at], curves.steps[at]
        where = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        said = f"The mean reward of a batch was {rewards[0]:.3g} in {where}, and is {fmean(now):.3g} lately"
        if len(before) == NUM_RECENT:
            apart = _errors_apart(before, now)
            trends = (("rises", apart >= SURE), ("falls", apart <= -SURE), ("is steady", abs(apart) < UNSURE))
            said += "".join(f", where it {trend}" for trend, holds in trends if holds)
        said += "."
    if not run.evals:
        return said
    oldest, newest = run.evals[0], run.evals[-1]
    if oldest is newest:
        return f"{said} Held-out accuracy is {newest.accuracy:.3f} (version {newest.version})."
    said += (
        f" Held-out accuracy went from {oldest.accuracy:.3f} (version {oldest.version}) to {newest.accuracy:.3f} "
        f"(version {newest.version})"
    )
    # with part credit the mean reward tells more: an accuracy of 0 may hide that the answers grow better
    if None not in (oldest.mean_reward, newest.mean_reward) and newest.mean_reward != newest.accuracy:
        said += f", mean reward from {oldest.mean_reward:.3f} to {newest.mean_reward:.3f}"
    return said + "."
