"""Rollouts that the log has and whose payloads are lost (not evicted) or damaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tba.errors import MalformedError, UnavailableError
from tba.wire import Rollout, Sampling, VersionSpan, decode_rollout, single_turn
from tba_buffer.index.rollout_index import Index, Rows
from tba_buffer.prompts.catalog import Catalog

UNREADABLE = "unreadable: what is stored of this rollout cannot be read"
"""The reason why a damaged rollout has no reward."""


def lost_payload_error(
    index: Index, positions: NDArray[np.integer], payloads: Sequence[bytes | None]
) -> UnavailableError | None:
    """Return the error for payloads that Redis has lost; None if all missing ones were evicted.

    Args:
        index: caught up with the log after the payloads were read, so it knows an eviction that took them.
        positions: [n] log positions of the drawn rollouts.
        payloads: [n] their payloads; None where Redis has none.
    """
    # an eviction would have removed the row: a live row without a payload is a loss
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


def decode_stored(payload: bytes, rollout_id: bytes) -> Rollout:
    """Decode the stored payload of a rollout, and check its id.

    Raises:
        WireError: the payload is damaged, or belongs to another rollout.
    """
    rollout = decode_rollout(payload)
    if rollout.rollout_id != rollout_id:
        raise MalformedError(f"what is stored of rollout {rollout_id.hex()} is rollout {rollout.rollout_id.hex()}")
    return rollout


def placeholders(index: Index, rows: Rows, *, run: str, catalog: Catalog) -> list[Rollout]:
    """Return substitutes for damaged rollouts, built from the index alone: status failed, without tokens. [n]

    Args:
        rows: [n] row numbers of the rollouts in the current index.
    """
    columns = [index.column(name, rows).tolist() for name in ("prompt", "lineage", "step", "num_tokens")]
    found = []
    for rollout_id, prompt, lineage, step, num_tokens in zip(index.rollout_ids(rows), *columns, strict=True):
        # the log keeps no tokens, visits, searchers or times
        prompt_id = catalog.ids[prompt] if prompt < len(catalog.ids) else "unreadable"
        known = catalog.find(prompt_id)
        found.append(
            Rollout(
                rollout_id=rollout_id,
                run=run,
                task="unreadable" if known is None else known[1].task,
                prompt_id=prompt_id,
                visit_id="unreadable",
                sequences=single_turn([], [], "abort"),
                response_text="",
                version_spans=(VersionSpan(lineage, step, 0, num_tokens),),
                sampling=Sampling.of(0.0),
                logprob_bytes=b"",
                ref_logprob=None,
                reward=None,
                reward_status="failed",
                reward_reason=UNREADABLE,
                reward_version=None,
                searcher_id="unreadable",
                started_at_s=0.0,
                finished_at_s=0.0,
            )
        )
    return found
