"""Which rollouts of a batch can be trained on. The others are refused with a reason and counted; training goes on.

The wire has checked every rollout by itself (tba.wire.decode_batch). Here is what only the trainer knows: the model's
vocabulary and length, which versions there are, what the objective needs. One bad rollout costs itself, and its group
only if it leaves a group of one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tba.config import Recipe
from tba.versions import START, LineageTree, PolicyVersion
from tba.wire import Batch, RefusedRollout, Rollout

MAX_ABS_REWARD = 1e9
"""Beyond it, float32 has no room beside a reward for a KL of some nats, and sums of squares overflow."""
MIN_SAMPLER_LOGPROB = -1000.0
"""Nats of one token. No sampler ever draws such a token: whoever sends it did not sample it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a rollout cannot be trained on: for counters, and for people."""

    reason: str
    text: str


GROUP_OF_ONE = Problem("group-of-one", "no other rollout of its prompt is left to compare it with")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What every rollout must have, whatever the step."""

    vocab_size: int
    max_tokens: int | None
    """Prompt and response together; None: the model has no limit."""
    ref_logprobs: bool
    """Rollouts must carry the starting model's log-prob: nobody else computes it."""
    min_group: int
    """Rollouts of one prompt in a batch: 2 where the objective compares them, else 1."""

    @classmethod
    def of(cls, recipe: Recipe, model: Any) -> Needs:
        """For the policy `model` and the recipe's objective."""
        section = recipe.objective
        return cls(
            vocab_size=int(model.get_input_embeddings().num_embeddings),
            max_tokens=getattr(model.config.get_text_config(), "max_position_embeddings", None),
            ref_logprobs=section.needs_reference and section.reference_placement == "searcher",
            min_group=1 if section.preset == "reinforce" else 2,
        )


def screen(batch: Batch, needs: Needs, *, lineages: LineageTree, trainer: PolicyVersion) -> Batch:
    """The batch without what cannot be trained on; that is in its `refused`, after what decoding refused.

    Args:
        lineages: every start of the trainer.
        trainer: the weights as they are now; a rollout of a later version cannot be.
    """
    parents, kept = lineages.parents, Counter[str]()
    looked_at: list[list[tuple[Rollout, Problem | None]]] = []
    for group in batch.groups:
        problems = [
            _problem(r, group.prompt_id, needs) or _version_problem(r, parents, trainer) for r in group.rollouts
        ]
        kept[group.prompt_id] += problems.count(None)
        looked_at.append(list(zip(group.rollouts, problems, strict=True)))
    groups, refused = [], list(batch.refused)
    for group, rollouts in zip(batch.groups, looked_at, strict=True):
        good = []
        for rollout, problem in rollouts:
            if problem is None and kept[group.prompt_id] < needs.min_group:
                problem = GROUP_OF_ONE
            if problem is None:
                good.append(rollout)
            else:
                detail = f"rollout {rollout.rollout_id.hex()} of prompt {group.prompt_id!r}: {problem.text}"
                refused.append(RefusedRollout(prompt_id=group.prompt_id, reason=problem.reason, detail=detail))
        if good:
            groups.append(replace(group, rollouts=tuple(good)))
    return replace(batch, groups=tuple(groups), refused=tuple(refused))


def count_reasons(refused: Iterable[RefusedRollout]) -> dict[str, int]:
    """Reason -> rollouts, in alphabetical order."""
    return dict(sorted(Counter(item.reason for item in refused).items()))


def _problem(rollout: Rollout, prompt_id: str, needs: Needs) -> Problem | None:
    """What is wrong with a rollout by itself."""
    if rollout.prompt_id != prompt_id:
        return Problem("prompt", f"it says that it is of prompt {rollout.prompt_id!r}")
    if rollout.reward is None or not math.isfinite(rollout.reward):
        return Problem("no-reward", f"its reward is {rollout.reward} (status {rollout.reward_status!r})")
    if abs(rollout.reward) > MAX_ABS_REWARD:
        return Problem(
            "reward-size", f"its reward is {rollout.reward:g}, beyond +-{MAX_ABS_REWARD:g}: scale the reward"
        )
    highest = int(max(rollout.prompt_tokens.max(), rollout.response_tokens.max()))
    if highest >= needs.vocab_size:
        text = f"token id {highest} is outside the model's vocabulary of {needs.vocab_size}"
        return Problem("vocabulary", f"{text}; searchers and trainer must use the same model")
    num_tokens = len(rollout.prompt_tokens) + len(rollout.response_tokens)
    if needs.max_tokens is not None and num_tokens > needs.max_tokens:
        return Problem("too-long", f"{num_tokens} tokens, the model reads {needs.max_tokens}")
    lowest = float(rollout.sampler_logprobs.min())
    if not lowest >= MIN_SAMPLER_LOGPROB:  # NaN too
        return Problem("sampler-logprob", f"a sampler log-prob is {lowest:g}: no sampler draws such a token")
    if needs.ref_logprobs and (rollout.ref_logprob is None or rollout.ref_logprob.version != START):
        text = "it has no ref log-prob of the starting model, which searchers compute in this run"
        return Problem("ref-logprob", f'{text} (objective.reference_placement = "searcher")')
    return None


def _version_problem(rollout: Rollout, parents: Mapping[int, PolicyVersion], trainer: PolicyVersion) -> Problem | None:
    """What is wrong with the versions that a rollout names. Where a dead lineage ended is not known here."""
    for span in rollout.version_spans:
        version = span.version
        start = START if version.lineage == 0 else parents.get(version.lineage)
        if start is None or version.step < start.step or (version.lineage == 0 and version != START):
            return Problem("unknown-version", f"no trainer start of this run made version {version}")
        if version.lineage == trainer.lineage and version.step > trainer.step:
            return Problem("future-version", f"version {version} comes after the trainer's own, {trainer}")
    return None
