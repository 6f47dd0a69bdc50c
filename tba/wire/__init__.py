"""Wire formats: msgpack between services, JSON for the weight manifest, each with a schema number."""

from tba.wire.batch import Batch, DrawnGroup, Group, RefusedRollout, decode_batch, encode_batch
from tba.wire.codec import new_id, new_rollout_id
from tba.wire.heartbeat import STARTED_AT_S, WAITED_S, Heartbeat, Wait, decode_heartbeat, encode_heartbeat
from tba.wire.rollout import (
    MAX_ROLLOUTS_PER_PUSH,
    RefLogprob,
    Rollout,
    RolloutDocument,
    Sampling,
    VersionSpan,
    check_push,
    decode_push,
    decode_rollout,
    encode_push,
    encode_rollout,
    storable_parts,
)
from tba.wire.weight_manifest import Canary, Manifest, StoredObject, decode_manifest, encode_manifest
