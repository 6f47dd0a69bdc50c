"""The record of a drawn batch in Redis, and the batch on the wire. Rollouts are never encoded again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tba.wire import DrawnGroup, encode_batch

ID_BYTES = 16


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """One slot: its prompt, what it drew from, and the rollout ids (16 bytes each) one after the other."""

    prompt_id: str
    source: str
    fallback: bool
    rollout_ids: bytes


class BatchRecord(msgspec.Struct, frozen=True, array_like=True):
    """A drawn batch without its payloads. `seed`, `log_position` and `most_on_policy_prob` reproduce the draw."""

    batch_id: str
    lineage: int
    step: int
    seed: int
    log_position: int
    deadline_s: float
    groups: list[GroupRecord]
    most_on_policy_prob: float | None = None
    """None: drawn by an older release."""

    @property
    def rollout_ids(self) -> list[bytes]:
        """The ids of all rollouts, group after group."""
        return _split(b"".join(group.rollout_ids for group in self.groups))

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts; repeated ones count as often as they occur."""
        return sum(len(group.rollout_ids) for group in self.groups) // ID_BYTES

    @property
    def member(self) -> str:
        """The batch as a member of `open_batches`."""
        return batch_member(self.batch_id, self.num_rollouts, self.lineage, self.step)

    def slots(self) -> dict[str, int]:
        """Count the slots of each kind, the rollouts, and the distinct ones within each slot."""
        ids = [_split(group.rollout_ids) for group in self.groups]
        return {
            "total": len(self.groups),
            "recent": sum(group.source == "recent" for group in self.groups),
            "replay": sum(group.source == "replay" for group in self.groups),
            "fallback": sum(group.fallback for group in self.groups),
            "rollouts": sum(map(len, ids)),
            "distinct_rollouts": sum(len(set(group)) for group in ids),
        }

    def encode(self) -> bytes:
        """Encode as msgpack."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> BatchRecord:
        """Read what `encode` wrote."""
        return _DECODER.decode(data)

    def body(self, payloads: Sequence[bytes]) -> bytes:
        """Encode the batch for the wire, from the stored bytes of its rollouts [num_rollouts]."""
        groups, at = [], 0
        for group in self.groups:
            end = at + len(group.rollout_ids) // ID_BYTES
            groups.append(
                DrawnGroup(
                    prompt_id=group.prompt_id,
                    source=group.source,
                    fallback=group.fallback,
                    payloads=payloads[at:end],
                )
            )
            at = end
        return encode_batch(
            batch_id=self.batch_id,
            deadline_s=self.deadline_s,
            seed=self.seed,
            log_position=self.log_position,
            groups=groups,
        )


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(BatchRecord)


def batch_member(batch_id: str, num_rollouts: int, lineage: int, step: int) -> str:
    """Return a batch as a member of `open_batches`."""
    return f"{batch_id}|{num_rollouts}|{lineage}|{step}"


def _split(rollout_ids: bytes) -> list[bytes]:
    return [rollout_ids[at : at + ID_BYTES] for at in range(0, len(rollout_ids), ID_BYTES)]
