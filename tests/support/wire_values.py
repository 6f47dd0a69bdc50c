"""Fixed values of every wire format, and the golden bytes that they encode to.

`python -m tests.support.wire_values` writes the golden files. Stored bytes and bytes in flight must stay readable. So a
change of a golden file needs a new schema number, and a clear error for the old one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tba.versions import PolicyVersion
from tba.wire import (
    Batch,
    Canary,
    Episode,
    Group,
    Heartbeat,
    Manifest,
    Message,
    RefLogprob,
    Rollout,
    Sampling,
    Segment,
    StoredObject,
    TokenSequence,
    VersionSpan,
    Wait,
    encode_batch,
    encode_heartbeat,
    encode_manifest,
    encode_push,
    encode_rollout,
    float32_bytes,
    int32_bytes,
    single_turn,
)
from tba.wire.weight_manifest import Delta, DeltaObject, TensorEntry, TensorFile, table_sha256
from tests.support.rollout_values import replace

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"


def scored_rollout(num_response_tokens: int = 1000) -> Rollout:
    """Return a rollout of two policy versions with the optional fields of a scored rollout."""
    edge = num_response_tokens // 2
    return Rollout(
        rollout_id=bytes(range(16)),
        run="demo",
        task="addition",
        prompt_id="p-7",
        visit_id="visit-1",
        sequences=single_turn(range(20), np.arange(num_response_tokens) * 131 % 50_000, "stop"),
        response_text="12 + 30 = 42 \N{CHECK MARK}",
        version_spans=(
            VersionSpan.of(PolicyVersion(1, 40), 0, edge),
            VersionSpan.of(PolicyVersion(1, 44), edge, num_response_tokens),
        ),
        sampling=Sampling.of(0.75, top_p=0.9, top_k=50, seed=2**31, stop=("\n\n", "Q:")),
        logprob_bytes=float32_bytes(-np.arange(num_response_tokens, dtype=np.float32) / np.float32(1024)),
        ref_logprob=RefLogprob.of(-123.5, PolicyVersion(0, 0)),
        reward=1.0,
        reward_status="scored",
        reward_reason=None,
        reward_version="addition-1",
        searcher_id="searcher-0",
        started_at_s=1_700_000_000.25,
        finished_at_s=1_700_000_001.5,
    )


def composite_rollout() -> Rollout:
    """Return a small rollout with the parts of its reward."""
    return replace(scored_rollout(3), reward_parts={"format": 1.0, "last_number": 0.5})


def pending_rollout() -> Rollout:
    """Return a rollout without any optional field."""
    return Rollout(
        rollout_id=bytes(range(16, 32)),
        run="demo",
        task="gsm8k",
        prompt_id="p-8",
        visit_id="visit-2",
        sequences=single_turn([5], [7, 0], "length"),
        response_text="",
        version_spans=(VersionSpan.of(PolicyVersion(0, 0), 0, 2),),
        sampling=Sampling.of(0.0),
        logprob_bytes=float32_bytes([-0.5, 0.0]),
        ref_logprob=None,
        reward=None,
        reward_status="pending",
        reward_reason=None,
        reward_version=None,
        searcher_id="searcher-1",
        started_at_s=1_700_000_002.0,
        finished_at_s=1_700_000_003.0,
    )


def conversation(**changes: Any) -> Rollout:
    """Return a rollout of two turns with a tool, and a third in a sequence that repeats the first reply."""
    reply, call = [20, 21, 0], [10, 11, 12, 0]
    first = (
        Segment("system", "environment", 2),
        Segment("user", "environment", 3),
        Segment("assistant", "policy", 4, is_trained=True, finish_reason="stop", parse_status="ok"),
        Segment("assistant", "template", 1),
        Segment("tool", "environment", 2, 1),
        Segment("assistant", "policy", 3, 1, is_trained=True, finish_reason="stop"),
    )
    second = (
        Segment("user", "environment", 4),
        Segment("assistant", "policy", 4, finish_reason="stop", parse_status="ok"),
        Segment("user", "environment", 2, 2),
        Segment("assistant", "policy", 2, 2, is_trained=True, finish_reason="length"),
        Segment("tool", "environment", 3, 2),
    )
    sequences = (
        TokenSequence(int32_bytes([1, 2, 3, 4, 5, *call, 6, 7, 8, *reply]), first),
        TokenSequence(int32_bytes([1, 2, 3, 9, *call, 7, 9, 30, 31, 5, 6, 7]), second),
    )
    spans = (VersionSpan.of(PolicyVersion(1, 3), 0, 4), VersionSpan.of(PolicyVersion(1, 4), 4, 9))
    episode = Episode(
        episode_id="episode-1",
        environment="calculator",
        environment_version="1",
        seed=5,
        stop_condition="max_turns",
        is_truncated=True,
        turn_rewards=(None, 0.5, 0.0),
        num_tool_calls=1,
        messages=(Message("user", "What is 2 * 3?"), Message("tool", "6", 1)),
    )
    logprobs = -np.arange(9, dtype=np.float32) / 8
    known = replace(scored_rollout(2), version_spans=spans, sampler_logprobs=logprobs, response_text="six")
    return replace(replace(known, sequences=sequences, episode=episode), **changes)


def payloads() -> list[bytes]:
    """Return the encoded rollouts of the golden push and batch."""
    return [encode_rollout(scored_rollout(3)), encode_rollout(pending_rollout())]


def batch_bytes() -> bytes:
    """Return an encoded batch of two groups."""
    first, second = payloads()
    return encode_batch(
        Batch(
            batch_id="batch-1",
            deadline_s=1_700_000_100.0,
            seed=2**63 - 1,
            log_position=12_345,
            groups=(
                Group(prompt_id="p-7", source="recent", fallback=False, rollouts=(first, first)),
                Group(prompt_id="p-8", source="replay", fallback=True, rollouts=(second,)),
            ),
        )
    )


def heartbeat() -> Heartbeat:
    """Return a heartbeat of a component that waits."""
    return Heartbeat(
        component_id="trainer-0",
        kind="trainer",
        run="demo",
        state="waiting",
        version=PolicyVersion(2, 8),
        wait=Wait(name="rollouts", for_s=1.5, deadline_in_s=598.5),
        gauges={"step": 8.0, "loss": -0.25},
    )


def manifest() -> Manifest:
    """Return the manifest of a version with a parent, stored whole and as a delta."""
    tensors = [
        TensorEntry(name="model.w", dtype="BF16", shape=[3, 4], file="model.safetensors", digest="ab" * 16),
        TensorEntry(name="model.b", dtype="F32", shape=[], file="model.safetensors", digest="ba" * 16),
    ]
    prefix = "runs/demo/weights/1-4"
    return Manifest(
        run="demo",
        version="1-4",
        parent="0-0",
        dtype="bfloat16",
        tensors=tensors,
        full=[TensorFile(name="model.safetensors", key=f"{prefix}/model.safetensors", size_bytes=1234)],
        delta=Delta(
            base="1-3",
            num_to_full=3,
            objects=[
                DeltaObject(
                    name=f"delta-00001-{'cc' * 16}.safetensors",
                    key=f"{prefix}/delta-00001-{'cc' * 16}.safetensors",
                    size_bytes=99,
                    digest="cc" * 16,
                )
            ],
        ),
        files=[
            StoredObject(
                name="config.json", key=f"runs/demo/files/{'cd' * 32}/config.json", size_bytes=12, sha256="cd" * 32
            )
        ],
        model_config_sha256="cd" * 32,
        tokenizer_sha256="ef" * 32,
        params_sha256=table_sha256((each.name, each.dtype, each.shape, each.digest) for each in tensors),
        canary=Canary(prompt_tokens=[1, 2], response_tokens=[3, 4], logprobs=[-0.5, -1.25], tolerance=0.001),
        torch_version="2.13.0",
        transformers_version="5.19.0",
        created_at_s=1_700_000_000.5,
    )


def encodings() -> dict[str, bytes]:
    """Return the bytes of each golden file by its name."""
    return {
        "rollout_v2.msgpack": encode_rollout(scored_rollout()),
        "rollout_parts_v2.msgpack": encode_rollout(composite_rollout()),
        "rollout_conversation_v2.msgpack": encode_rollout(conversation()),
        "push_v1.msgpack": encode_push(payloads()),
        "batch_v1.msgpack": batch_bytes(),
        "heartbeat_v1.msgpack": encode_heartbeat(heartbeat()),
        "manifest_v2.json": encode_manifest(manifest()),
    }


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file_name, data in encodings().items():
        (GOLDEN / file_name).write_bytes(data)
