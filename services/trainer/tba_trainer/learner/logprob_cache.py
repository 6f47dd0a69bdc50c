"""Log-probs of rollouts under other policies than theta, kept by rollout id, and the passes that compute them.

A rollout may be drawn again and again: the reference and the old policy see it once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tba.wire import Rollout
from tba_trainer.learner.forward_backward import Ranks, Values, pack_rollouts, plan_micro_batches
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import response_sums


class LogprobCache:
    """Log-probs by rollout id: the sum over the response [1], or one number per response token [T].

    Args:
        max_rollouts: the least recently used go first.
    """

    def __init__(self, max_rollouts: int = 0) -> None:
        self._max_rollouts = max_rollouts
        self._values: OrderedDict[bytes, Values] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, rollout: Rollout, num_values: int) -> Values | None:
        """Return the values of a rollout if there are so many of them."""
        values = self._values.get(rollout.rollout_id)
        # other numbers come from a checkpoint that was made before the recipe asked for sums, or for tokens
        if values is None or len(values) != num_values:
            return None
        self._values.move_to_end(rollout.rollout_id)
        return values

    def put(self, rollout: Rollout, values: Values) -> None:
        """Keep the values of a rollout."""
        self._values[rollout.rollout_id] = values
        self._values.move_to_end(rollout.rollout_id)

    def evict(self) -> None:
        """Drop what is too much: after the reads, because a batch may be larger than the cache."""
        while len(self._values) > self._max_rollouts:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Drop everything: the policy has changed."""
        self._values.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return the cache, least recently used first.

        `rollout_ids` uint8 [n, 16], and one after the other `ref_logprobs` float64; `num_values` int64 [n] of each
        rollout where that is not 1.
        """
        # The order is part of the state: a resumed run must evict what the run that was never stopped would evict.
        ids = np.frombuffer(b"".join(self._values), dtype=np.uint8).reshape(len(self._values), 16)
        values = np.concatenate([*self._values.values(), np.zeros(0)])
        tensors = {"rollout_ids": torch.from_numpy(ids.copy()), "ref_logprobs": torch.from_numpy(values)}
        lengths = torch.tensor([len(each) for each in self._values.values()], dtype=torch.int64)
        return tensors if bool((lengths == 1).all()) else {**tensors, "num_values": lengths}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the cache from a checkpoint."""
        ids, values = tensors["rollout_ids"].numpy(), tensors["ref_logprobs"].numpy()
        lengths = tensors["num_values"].numpy() if "num_values" in tensors else np.ones(len(ids), dtype=np.int64)
        parts = np.split(values, np.cumsum(lengths)[:-1]) if len(ids) else []
        self._values = OrderedDict((row.tobytes(), part) for row, part in zip(ids, parts, strict=True))


@torch.no_grad()
def compute_logprobs(
    policy: LogprobModel, rollouts: Sequence[Rollout], *, per_token: bool, micro_batch_tokens: int, ranks: Ranks
) -> list[Values]:
    """Return the log-probs of some rollouts, at least one, under a policy; every rank gets all of them.

    Args:
        per_token: one number per response token, not their sum.
        micro_batch_tokens: most tokens of one forward pass.
    """
    plan = plan_micro_batches(
        # each rollout is a group of its own: its log-prob depends on no other rollout
        [len(r.prompt_tokens) + len(r.response_tokens) for r in rollouts],
        range(len(rollouts)),
        micro_batch_tokens,
        rows=range(len(rollouts)),
        num_ranks=ranks.num_ranks,
        keep_groups=False,
    )
    lengths = [len(r.response_tokens) if per_token else 1 for r in rollouts]
    ends = np.cumsum(lengths).tolist()
    # each rank fills in its own rollouts; the sum over the ranks completes them
    values = torch.zeros(ends[-1], dtype=torch.float64)
    for micro_batches in plan:
        rows = micro_batches[ranks.rank]
        sequences = pack_rollouts([rollouts[i] for i in rows], policy.device)
        logprobs = policy.token_logprobs(sequences)  # [T]
        found = logprobs if per_token else response_sums(logprobs, sequences)
        at = [j for i in rows for j in range(ends[i] - lengths[i], ends[i])]
        # an empty micro-batch ran with a filler, which has a value too: the slice drops it
        values[at] = found[: len(at)].double().cpu()
    return [part.copy() for part in np.split(ranks.all_reduce(values).numpy(), ends[:-1])]
