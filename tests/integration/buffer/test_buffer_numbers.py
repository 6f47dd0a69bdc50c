"""Numbers of any size and damaged rollouts: each costs itself alone, and every GET continues.

test_buffer_extremes.py sends extreme but well-typed values to every endpoint that writes, then every GET.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import pytest
from redis import Redis
from tba_buffer.storage.keys import Keys

from tba.fields import MAX_NUMBER
from tba.wire import Rollout, encode_rollout
from tests.support.buffer import make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.buffer_reads import read_everything
from tests.support.leases import request_eval
from tests.support.redis_process import RedisProcess
from tests.support.reward_server import RewardServer
from tests.support.scored_buffer import sections, statuses
from tests.support.waits import until

KEYS = Keys("test")


EXTREME_ROLLOUTS: dict[str, dict[str, Any]] = {
    "reward": {"reward": 1e308},
    "reward below": {"reward": -1e16},
    "times": {"started_at_s": -1e308, "finished_at_s": 1e308},
    "temperature": {"sampling": {"temperature": 1e308, "top_p": 1.0, "top_k": 0, "seed": None, "stop": []}},
    "seed": {"sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 2**64 - 1, "stop": []}},
    "ref log-prob": {"ref_logprob": [-1e308, 0, 0]},
    "ref version": {"ref_logprob": [-1.0, 2**63, 2**63]},
    "step": {"version_spans": [[0, 10**12, 0, 3]]},
    "log-probs": {"sampler_logprobs": np.full(3, -3e38, np.float32).tobytes()},
}


def changed(rollout: Rollout, fields: Mapping[str, Any]) -> bytes:
    return bytes(msgpack.packb({**msgpack.unpackb(encode_rollout(rollout)), **fields}))  # pyright: ignore[reportArgumentType]


def test_a_pushed_number_that_is_too_large_costs_its_own_rollout_alone(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer().begin(2)
    payloads = [changed(make_rollout(), fields) for fields in EXTREME_ROLLOUTS.values()]
    reply = client.push([*payloads, encode_rollout(make_rollout(reward=float(MAX_NUMBER)))])
    outcomes = dict(zip([*EXTREME_ROLLOUTS, "the largest"], reply.outcomes, strict=True))
    assert {name: item.outcome for name, item in outcomes.items()} == {
        **dict.fromkeys(EXTREME_ROLLOUTS, "refused"),
        "the largest": "new",
    }
    assert "'reward' is 1e+308, beyond 1e+15" in str(outcomes["reward"].reason)
    read_everything(client.base_url)
    stats = client.stats()
    assert (stats.num_rollouts, stats.refused) == (1, {"malformed": len(EXTREME_ROLLOUTS)})


def test_a_huge_reward_of_a_scorer_is_a_failure_of_its_item_and_never_a_reward(
    serve_buffer: ServeBuffer, reward: RewardServer
) -> None:
    odd = {"huge": 1e308, "long": float(10**300), "nan": float("nan"), "fine": 3.0}
    reward.score = lambda item: odd[item["response"]]
    client, _ = serve_buffer(**sections(reward)).begin(1)
    client.push([encode_rollout(make_rollout(reward=None, response_text=text)) for text in odd])
    until("all are scored", lambda: statuses(client)[1] == 0)
    found = {item.response_text: (item.reward, item.reward_reason) for item in client.list_rollouts().rollouts}
    assert found["fine"] == (3.0, None)
    assert {name: (value, str(why).split(":")[0]) for name, (value, why) in found.items() if name != "fine"} == {
        "huge": (None, "too_large"),
        "long": (None, "too_large"),
        "nan": (None, "not_finite"),
    }
    read_everything(client.base_url)


def test_an_id_of_an_evaluation_that_is_no_text_hides_no_other(serve_buffer: ServeBuffer, raw: Redis) -> None:
    client = serve_buffer().with_prompts(2, 3)
    info = request_eval(client, start_lineage(client))
    raw.rpush(KEYS.eval_order, b"\xff\xfe")
    assert [item.eval_id for item in client.run().evals] == [info.eval_id]


def test_a_reward_that_an_older_buffer_stored_is_failed(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    buffer = serve_buffer()
    client, _ = buffer.begin(2, 3)
    with pytest.MonkeyPatch.context() as older:
        older.setattr("tba.wire.rollout.is_bounded", np.isfinite)
        older.setattr("tba_buffer.index.rollout_index.MAX_NUMBER", 1.7e308)
        pushed = client.push([encode_rollout(make_rollout(reward=value)) for value in (1e308, 1e308, 1.0)])
    assert [item.outcome for item in pushed.outcomes] == ["new"] * 3
    buffer.stop()
    client = serve_buffer().client()
    read_everything(client.base_url)
    stats = client.stats()
    assert (stats.num_scored, stats.num_failed, stats.mean_reward_recent) == (1, 2, 1.0)
    assert [item.reward_status for item in client.list_rollouts(order="oldest").rollouts] == [
        "failed",
        "failed",
        "scored",
    ]


def test_a_pending_rollout_that_cannot_be_read_is_failed_and_the_others_are_scored(
    serve_buffer: ServeBuffer, raw: Redis, reward: RewardServer
) -> None:
    reward.gate.clear()
    first = serve_buffer(**sections(reward, buffer={"SCORE_EVERY_S": 1000.0}))
    client, _ = first.begin(1)
    client.push([encode_rollout(make_rollout(reward=None)) for _ in range(4)])
    bad = client.list_rollouts(order="oldest").rollouts[0].rollout_id
    raw.hset(KEYS.payloads, bytes.fromhex(bad), b"\xff\x00")
    reward.gate.set()
    first.stop()
    client = serve_buffer(**sections(reward)).client()
    until("the others are scored", lambda: statuses(client) == (3, 0, 1))
    again = serve_buffer(**sections(reward)).client()
    assert statuses(again) == (3, 0, 1), "the log says so"
