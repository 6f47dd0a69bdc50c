"""Micro-batches: which rollouts share a forward and backward pass, on which rank.

A group in one micro-batch gets its statistics from the pass that the gradient needs anyway; one that spans several
costs a first pass. The plan weighs that against ranks that wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_PASS_COST = 1 / 3
"""A pass without gradient, as a share of one with: forward against forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rollouts of one forward and backward pass, as positions in the batch; may be empty."""

    indices: tuple[int, ...]
    whole_groups: bool
    """True when every group in it is complete: then one forward pass gives its statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The micro-batches of every rank."""

    rounds: tuple[tuple[MicroBatch, ...], ...]
    """[num_micro_batches][num_ranks]; the ranks work on the micro-batches of a round at the same time."""

    def of_rank(self, rank: int) -> list[MicroBatch]:
        """Return the micro-batches of one rank, one per round."""
        return [micro_batches[rank] for micro_batches in self.rounds]

    def renumbered(self, positions: Sequence[int]) -> Plan:
        """Return the plan of a part of a batch in the positions of the batch; rollout i of it is at `positions[i]`.

        `whole_groups` still means complete in the part.
        """

        def moved(micro_batch: MicroBatch) -> MicroBatch:
            return replace(micro_batch, indices=tuple(positions[i] for i in micro_batch.indices))

        return Plan(rounds=tuple(tuple(map(moved, micro_batches)) for micro_batches in self.rounds))

    def split_rounds(self) -> list[int]:
        """Return the rounds in which some rank has an incomplete group."""
        return [i for i, micro_batches in enumerate(self.rounds) if not all(m.whole_groups for m in micro_batches)]


def plan_micro_batches(
    lengths: Sequence[int],
    groups: Sequence[int],
    max_tokens: int,
    *,
    num_ranks: int = 1,
    keep_groups: bool = True,
) -> Plan:
    """Distribute N rollouts over micro-batches of at most `max_tokens`, all with about the same number of tokens.

    A rollout longer than `max_tokens` gets a micro-batch of its own. A pure function of lengths and groups: every rank
    computes the plan of all. All ranks get the same number of micro-batches, some of them empty where rollouts are few,
    because every pass of a sharded model is a collective.

    Args:
        lengths: [N] prompt plus response tokens.
        groups: [N] group number of each rollout.
        max_tokens: of one micro-batch.
        num_ranks: processes that share the batch.
        keep_groups: keep a group in one micro-batch where it fits, so that it needs no first pass; False where no
            advantage depends on theta's log-probs of other rollouts.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    single = _pack([(i,) for i in range(len(lengths))], lengths, max_tokens, num_ranks)
    plan = _plan(single, lengths, members, num_ranks)
    if not keep_groups:
        return plan
    items: list[tuple[int, ...]] = []
    for indices in members.values():
        whole = sum(lengths[i] for i in indices) <= max_tokens
        items.extend([tuple(indices)] if whole else [(i,) for i in indices])
    kept = _plan(_pack(items, lengths, max_tokens, num_ranks), lengths, members, num_ranks)
    # groups are split all the same where ranks would else wait for each other longer than the first pass takes
    return min(kept, plan, key=lambda p: _cost(p, lengths))


def _pack(items: Sequence[tuple[int, ...]], lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Return bins of rollouts, in a multiple of `num_ranks`: the largest item first, each into the emptiest bin."""
    sizes = {item: sum(lengths[i] for i in item) for item in items}
    order = sorted(items, key=lambda item: (-sizes[item], item))
    # an item longer than a bin fills one bin, no more
    num_tokens = sum(min(size, max_tokens) for size in sizes.values())
    # -(-a // b) is a / b, rounded up. No fewer bins can hold that many tokens; more are tried where they do not fit.
    num_bins = num_ranks * max(1, -(-num_tokens // (max_tokens * num_ranks)))
    while True:  # with one more bin per rank each time, until everything fits
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        loads = [0] * num_bins
        for item in order:
            emptiest = min(range(num_bins), key=loads.__getitem__)
            if loads[emptiest] and loads[emptiest] + sizes[item] > max_tokens:
                break
            bins[emptiest].extend(item)
            loads[emptiest] += sizes[item]
        else:
            return bins
        num_bins += num_ranks


def _plan(bins: Sequence[list[int]], lengths: Sequence[int], members: dict[int, list[int]], num_ranks: int) -> Plan:
    """Put bins of about the same load into one round."""
    # the largest first: a micro-batch that does not fit into memory then fails at once
    by_load = sorted(bins, key=lambda indices: (-sum(lengths[i] for i in indices), indices))
    group_of = {i: group for group, indices in members.items() for i in indices}

    def micro_batch(indices: list[int]) -> MicroBatch:
        here = {group_of[i] for i in indices}
        whole = sum(len(members[group]) for group in here) == len(indices)
        return MicroBatch(indices=tuple(sorted(indices)), whole_groups=whole)

    micro_batches = [micro_batch(indices) for indices in by_load]
    return Plan(
        rounds=tuple(
            tuple(micro_batches[start : start + num_ranks]) for start in range(0, len(micro_batches), num_ranks)
        )
    )


def _cost(plan: Plan, lengths: Sequence[int]) -> float:
    """Return the token passes until the slowest rank is done with every round."""
    rounds = [max(sum(lengths[i] for i in m.indices) for m in micro_batches) for micro_batches in plan.rounds]
    return sum(rounds) + FIRST_PASS_COST * sum(rounds[i] for i in plan.split_rounds())
