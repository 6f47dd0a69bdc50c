"""Wire formats: msgpack between services, JSON for the weight manifest, each with a schema number."""

from tba.wire.batch import Batch, DrawnGroup, Group, decode_batch, encode_batch
from tba.wire.heartbeat import Heartbeat, Wait, decode_heartbeat, encode_heartbeat
from tba.wire.ids import new_id, new_rollout_id
from tba.wire.manifest import Canary, Manifest, StoredObject, decode_manifest, encode_manifest
from tba.wire.rollout import (
    MAX_ROLLOUTS_PER_PUSH,
    RefLogprob,
    Rollout,
    Sampling,
    VersionSpan,
    decode_push,
    decode_rollout,
    encode_push,
    encode_rollout,
)

__all__ = [
    "MAX_ROLLOUTS_PER_PUSH",
    "Batch",
    "Canary",
    "DrawnGroup",
    "Group",
    "Heartbeat",
    "Manifest",
    "RefLogprob",
    "Rollout",
    "Sampling",
    "StoredObject",
    "VersionSpan",
    "Wait",
    "decode_batch",
    "decode_heartbeat",
    "decode_manifest",
    "decode_push",
    "decode_rollout",
    "encode_batch",
    "encode_heartbeat",
    "encode_manifest",
    "encode_push",
    "encode_rollout",
    "new_id",
    "new_rollout_id",
]
