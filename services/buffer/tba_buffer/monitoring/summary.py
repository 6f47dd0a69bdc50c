"""Sum up a run in sentences: what it does, how it learns, which wait is the longest, and what to try.

A pure function of the answers to GET /v1/run, /v1/stats and /v1/curves, so that page and commands say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from tba.api import ENDED, Curves, RunInfo, RunSummary, Stats, WaitInfo
from tba.config.trainer import REMEDIES

CURVE_NAMES = ("reward_mean", "ess", "tied_group_share", "wait_s", "step_s")
"""The metrics that the sentences read."""
NUM_POINTS = 60
NUM_RECENT = 10
"""How many points at the end of a curve are its present; as many before them are its past."""
MIN_WAIT_S = 5.0
"""Shorter waits are normal, and are not reported."""
FLAT = 0.01
"""The reward is flat if the means of past and present differ by at most this share of the curve's max - min."""
NUM_NAMED = 3
MIN_SCORED = 64
"""With fewer stored rewards, equal ones may be chance."""
STARVED_SHARE = 0.5
URGENT_FAILED_SHARE = 0.5
FAILED_SHARE = 0.05
"""A smaller share of failed scores is normal: a scorer may abstain, or an answer may be too long."""
LOW_ESS = 0.3
TIED_SHARE = 0.8
REMEDY_OF_WAIT = {
    "no-version": "the trainer has not published yet; look at its state below",
    "no-prompts": "upload prompts (`tba prompts upload`)",
    "trainer-ahead": "nothing: searchers are faster than the trainer needs, so fewer of them would do (`tba scale`)",
    "unscored": "look at the reward service: rewards of stored rollouts are unknown",
    "reward-workers": "give the reward service more workers (`reward.num_workers`) or replicas",
    "reward-unreachable": "start the reward service, or correct its URL (`tba doctor`); or its scorer hangs (its log)",
    "reward": "start the reward service, or correct its URL (`tba doctor`)",
    "scorer-away": "look at the scorer's endpoint or model (`tba doctor`)",
    "buffer-unreachable": "look at the network between searchers and buffer (`tba doctor`)",
    "rollouts": "look at the searchers; more of them fill the buffer sooner (`tba scale`)",
    "samples-per-insert": "add searchers (`tba scale`), or raise `sampling.samples_per_insert`",
    "used-up": "add searchers (`tba scale`), or raise `sampling.max_uses`",
    "batch": "look at the buffer: it does not answer the trainer's request for a batch",
    "unpublished-versions": "look at the object store, or publish less often (`trainer.sync_interval`)",
    "object-store": "look at the object store (`tba doctor`)",
    "checkpoint-download": "look at the object store (`tba doctor`)",
    "checkpoint-upload": "look at the object store (`tba doctor`)",
    "final-evaluation": "nothing: searchers evaluate the last version",
    "run-paused": "resume it when you like (`tba resume`)",
}
"""Name of a wait -> what to try; docs/operations.md explains every wait."""


def summarise(info: RunInfo, stats: Stats, curves: Curves) -> RunSummary:
    """Return the sentences of the summary.

    Args:
        curves: the curves of CURVE_NAMES, with at most NUM_POINTS points.
    """
    is_over = info.read_only or info.state in ("done", "failed")
    long = [] if is_over else [wait for wait in info.waits if wait.for_s >= MIN_WAIT_S]
    # the trainer's first: while it waits nothing is learned
    wait = max(long, key=lambda wait: (wait.kind == "trainer", wait.for_s), default=None)
    waiting = None
    if wait is not None:
        left_s = max(0.0, wait.deadline_in_s)
        waiting = f"{wait.owner} waits for {wait.name!r} since {wait.for_s:.0f} s (at most {left_s:.0f} s more)."
    # the most urgent thing to try; of a run that is over, what its data calls for
    advice = None
    if not is_over:
        advice = _advice_on_failures(stats, URGENT_FAILED_SHARE) or _advice_on_parts(info, wait)
    advice = advice or _advice_on_data(stats, curves)
    waited, took = _recent(curves, "wait_s") or 0.0, _recent(curves, "step_s")
    if advice is None and not is_over and took is not None and waited > STARVED_SHARE * (waited + took):
        share = 100 * waited / (waited + took)
        advice = f"The trainer waits {share:.0f} % of its time for rollouts: add searchers (`tba scale`)."
    return RunSummary(doing=_doing(info, stats), learning=_learning(info, curves), waiting=waiting, advice=advice)


def _doing(info: RunInfo, stats: Stats) -> str:
    searchers = [item for item in info.components if item.kind == "searcher" and item.alive]
    tokens_per_s = sum(item.gauges.get("tokens_per_s", 0.0) for item in searchers)
    at = f"step {info.step:,}" + ("" if info.num_steps is None else f" of {info.num_steps:,}")
    stored = f"{stats.num_rollouts:,} rollouts are stored"
    if info.state in ("done", "failed"):
        why = f" ({info.state_reason})" if info.state_reason else ""
        return f"The run {'is done' if info.state == 'done' else 'has failed'}{why} at {at}; {stored}."
    if info.state != "running":
        why = f" ({info.state_reason})" if info.state_reason else ""
        return f"The run is {info.state}{why} at {at}; {stored}."
    if info.read_only:
        return f"Nothing of this run is alive; it was not brought to an end at {at}. {stored[0].upper()}{stored[1:]}."
    who = "1 searcher makes" if len(searchers) == 1 else f"{len(searchers)} searchers make"
    trainer = next((item for item in info.components if item.kind == "trainer" and item.alive), None)
    doing = "no trainer is there" if trainer is None else f"the trainer is {trainer.state}"
    return (
        f"At {at}, {doing}; {f'{who} {tokens_per_s:,.0f} tokens/s' if searchers else 'no searcher is alive'}; {stored}."
    )


def _learning(info: RunInfo, curves: Curves) -> str | None:
    if not curves.num_steps:
        return None
    known = [value for value in curves.values.get("reward_mean", []) if value is not None]
    if not known:
        said = "No step knows a reward so far."
    else:
        first, now = _mean(known[:NUM_RECENT]), _mean(known[-NUM_RECENT:])
        said = f"The mean reward of a batch is {now:.3g}."
        if len(known) >= 2 * NUM_RECENT:
            before, spread = _mean(known[-2 * NUM_RECENT : -NUM_RECENT]), max(known) - min(known)
            how = "is flat" if abs(now - before) <= FLAT * spread else "rises" if now > before else "falls"
            said = f"The mean reward of a batch began at {first:.3g}, is {now:.3g}, and {how} lately."
    done = [item for item in info.evals if item.state == "done" and item.accuracy is not None and not item.abandoned]
    if not done:
        return said
    oldest, newest = done[0], done[-1]
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


def _advice_on_failures(stats: Stats, min_share: float) -> str | None:
    share = stats.num_failed / max(1, stats.num_failed + stats.num_scored)
    if not share or share < min_share:
        return None
    reasons = stats.failed_reasons
    why = f", most often with the reason {reasons[0].example!r}" if reasons else ""
    return (
        f"{100 * share:.0f} % of the stored rollouts have no score ({stats.num_failed:,} failed){why}; nothing learns "
        "from these. Try: compare their data with what the scorer needs (Rollouts, Failed; `tba config check`)."
    )


def _advice_on_parts(info: RunInfo, wait: WaitInfo | None) -> str | None:
    for item in info.components:
        for name, text in REMEDIES.items():
            if item.gauges.get(f"alarm_on_{name}"):
                return f"Alarm {name}: {text}."
    if wait is not None and (remedy := REMEDY_OF_WAIT.get(wait.name)) is not None:
        return f"Try: {remedy}."
    silent = [
        item.component_id
        for item in info.components
        if item.kind in ("searcher", "trainer") and not item.alive and item.state not in ENDED
    ]
    if silent:
        names = ", ".join(silent[:NUM_NAMED]) + (", ..." if len(silent) > NUM_NAMED else "")
        return f"Try: look at the logs of {names}: silent without having ended; others do their work meanwhile."
    return None


def _advice_on_data(stats: Stats, curves: Curves) -> str | None:
    if (failures := _advice_on_failures(stats, FAILED_SHARE)) is not None:
        return failures
    deciles = stats.stored.reward_deciles if stats.stored is not None else None
    # over all prompts: that says more than groups of equal rewards, which easy or hard prompts make too
    if deciles is not None and deciles[0] == deciles[-1] and stats.num_scored >= MIN_SCORED:
        return (
            f"All {stats.num_scored:,} stored rewards are {deciles[0]:g}, so nothing can be learned. Is the scorer "
            "right? Compare completions with their gold data (Rollouts), and try it on examples (`tba score`)."
        )
    if (tied := _recent(curves, "tied_group_share")) is not None and tied > TIED_SHARE:
        return (
            f"In {100 * tied:.0f} % of the groups all rewards are equal, so little can be learned: prompts that are "
            'too easy or too hard (`data.selection = "posterior"` leaves them out), or a scorer that sees no '
            "difference (Rollouts)."
        )
    if (ess := _recent(curves, "ess")) is not None and ess < LOW_ESS:
        return f"The effective sample size is {ess:.2f}: {REMEDIES['ess_collapse']}."
    return None


def _recent(curves: Curves, name: str) -> float | None:
    known = [value for value in curves.values.get(name, [])[-NUM_RECENT:] if value is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
