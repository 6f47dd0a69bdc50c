"""Wire formats: msgpack between services, JSON for the weight manifest, each with a schema number."""

from tba.wire.batch import Batch, Group, Refusal, decode_batch, encode_batch
from tba.wire.codec import float32_bytes, int32_bytes, new_id, new_rollout_id
from tba.wire.heartbeat import STARTED_AT_S, WAITED_S, Heartbeat, Wait, decode_heartbeat, encode_heartbeat
from tba.wire.rollout import (
    MAX_ROLLOUTS_PER_PUSH,
    RefLogprob,
    Rollout,
    Sampling,
    VersionSpan,
    decode_push,
    decode_rollout,
    decode_rollouts,
    encode_push,
    encode_rollout,
    storable_parts,
    with_paid,
)
from tba.wire.sequences import Episode, Message, Segment, TokenSequence, single_turn
from tba.wire.weight_manifest import Canary, Manifest, StoredObject, decode_manifest, encode_manifest
