"""Rollouts that the log has and whose payloads Redis does not have: lost by Redis, not evicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tba.errors import UnavailableError
from tba_buffer.index import Index


def lost_error(
    index: Index, positions: NDArray[np.integer], payloads: Sequence[bytes | None]
) -> UnavailableError | None:
    """What to say when payloads [n] of the rollouts at log positions [n] are missing; None when they were evicted.

    Args:
        index: levelled after the payloads were read, so an eviction that took them is in it.
        positions: of what was drawn.
        payloads: None where Redis has none.
    """
    rows = index.rows_at(np.unique(positions[[payload is None for payload in payloads]]))
    lost = rows[rows >= 0]
    if not len(lost):
        return None
    rollout_id = index.rollout_ids(lost[:1])[0].hex()
    return UnavailableError(
        f"{len(lost)} drawn rollouts are in the log but their payloads are not in Redis (for example "
        f"{rollout_id}): Redis lost data, or somebody deleted it; restore Redis from a backup, or start another run "
        "with a snapshot"
    )
