"""Drop the rollouts of a batch that cannot be trained on. Each is refused with a reason and counted.

The wire has checked every rollout by itself (tba.wire.decode_batch). These checks need what only the trainer knows: the
model's vocabulary and length, the versions that exist, the needs of the objective. A bad rollout costs only itself,
and its group only where a group of one is left.
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
"""Nats of one token. A sampler never draws such a token, so its sender did not sample it."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a rollout cannot be trained on."""

    reason: str
    """For counters."""
    text: str
    """For people."""


GROUP_OF_ONE = Rejection("group-of-one", "no other rollout of its prompt is left to compare it with")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Properties that every rollout must have, at every step."""

    vocab_size: int
    max_tokens: int | None
    """Prompt and response together; None: the model has no limit."""
    ref_logprobs: bool
    """Rollouts must carry the starting model's log-prob, because the trainer computes none."""
    min_group: int
    """Fewest rollouts of one prompt in a batch."""

    @classmethod
    def of(cls, recipe: Recipe, model: Any) -> Requirements:
        """Return the requirements of a policy and of the recipe's objective."""
        section = recipe.objective
        return cls(
            vocab_size=int(model.get_input_embeddings().num_embeddings),
            max_tokens=getattr(model.config.get_text_config(), "max_position_embeddings", None),
            ref_logprobs=section.needs_reference and section.reference_placement == "searcher",
            # every other objective compares the rollouts of a group with each other; groups of one are its own choice
            min_group=1 if section.preset == "reinforce" or recipe.sampling.group_size == 1 else 2,
        )


def filter_batch(batch: Batch, required: Requirements, *, lineages: LineageTree, trainer: PolicyVersion) -> Batch:
    """Return the batch without the rollouts that cannot be trained on; they join its `refused`.

    Args:
        lineages: every start of the trainer.
        trainer: the current weights; a rollout of a later version cannot exist.
    """
    parents, num_good = lineages.parents, Counter[str]()
    checked: list[list[tuple[Rollout, Rejection | None]]] = []
    for group in batch.groups:
        rejections = [
            _check(r, group.prompt_id, required) or _check_versions(r, parents, trainer) for r in group.rollouts
        ]
        num_good[group.prompt_id] += rejections.count(None)
        checked.append(list(zip(group.rollouts, rejections, strict=True)))
    groups, refused = [], list(batch.refused)
    for group, rollouts in zip(batch.groups, checked, strict=True):
        good = []
        for rollout, rejection in rollouts:
            # counted per prompt, not per group: a prompt may come in several groups of one batch
            if rejection is None and num_good[group.prompt_id] < required.min_group:
                rejection = GROUP_OF_ONE
            if rejection is None:
                good.append(rollout)
            else:
                detail = f"rollout {rollout.rollout_id.hex()} of prompt {group.prompt_id!r}: {rejection.text}"
                refused.append(RefusedRollout(prompt_id=group.prompt_id, reason=rejection.reason, detail=detail))
        if good:
            groups.append(replace(group, rollouts=tuple(good)))
    return replace(batch, groups=tuple(groups), refused=tuple(refused))


def count_reasons(refused: Iterable[RefusedRollout]) -> dict[str, int]:
    """Count rollouts by reason, in alphabetical order."""
    return dict(sorted(Counter(item.reason for item in refused).items()))


def _check(rollout: Rollout, prompt_id: str, required: Requirements) -> Rejection | None:
    """Check a rollout by itself."""
    if rollout.prompt_id != prompt_id:
        return Rejection("prompt", f"it says that it is of prompt {rollout.prompt_id!r}")
    if rollout.reward is None or not math.isfinite(rollout.reward):
        return Rejection("no-reward", f"its reward is {rollout.reward} (status {rollout.reward_status!r})")
    if abs(rollout.reward) > MAX_ABS_REWARD:
        return Rejection(
            "reward-size", f"its reward is {rollout.reward:g}, beyond +-{MAX_ABS_REWARD:g}: scale the reward"
        )
    highest = int(max(rollout.prompt_tokens.max(), rollout.response_tokens.max()))
    if highest >= required.vocab_size:
        text = f"token id {highest} is outside the model's vocabulary of {required.vocab_size}"
        return Rejection("vocabulary", f"{text}; searchers and trainer must use the same model")
    num_tokens = len(rollout.prompt_tokens) + len(rollout.response_tokens)
    if required.max_tokens is not None and num_tokens > required.max_tokens:
        return Rejection("too-long", f"{num_tokens} tokens, the model reads {required.max_tokens}")
    lowest = float(rollout.sampler_logprobs.min())
    if not lowest >= MIN_SAMPLER_LOGPROB:  # "not >=" also catches NaN
        return Rejection("sampler-logprob", f"a sampler log-prob is {lowest:g}: no sampler draws such a token")
    if required.ref_logprobs and (rollout.ref_logprob is None or rollout.ref_logprob.version != START):
        text = "it has no ref log-prob of the starting model, which searchers compute in this run"
        return Rejection("ref-logprob", f'{text} (objective.reference_placement = "searcher")')
    return None


def _check_versions(rollout: Rollout, parents: Mapping[int, PolicyVersion], trainer: PolicyVersion) -> Rejection | None:
    """Check the versions that a rollout names."""
    for span in rollout.version_spans:
        version = span.version
        start = START if version.lineage == 0 else parents.get(version.lineage)
        # a version past the end of a dead lineage passes: where that lineage ended is not known here
        if start is None or version.step < start.step or (version.lineage == 0 and version != START):
            return Rejection("unknown-version", f"no trainer start of this run made version {version}")
        if version.lineage == trainer.lineage and version.step > trainer.step:
            return Rejection("future-version", f"version {version} comes after the trainer's own, {trainer}")
    return None
