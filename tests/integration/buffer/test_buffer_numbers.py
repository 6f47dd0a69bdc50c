"""Numbers of any size and stored items of any content: each costs itself alone, and every GET continues.

test_buffer_extremes.py sends extreme but well-typed values to every endpoint that writes, then every GET.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import pytest
from redis import Redis
from tba_buffer.storage.keys import Keys

from tba.api import EvalInfo, Lease, SettingsRequest
from tba.clients import BufferClient
from tba.config import LiveSettings
from tba.fields import MAX_NUMBER
from tba.wire import Heartbeat, Rollout, encode_rollout
from tests.support.buffer import make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.buffer_reads import READS, ask, named, read_everything
from tests.support.leases import lease, request_eval
from tests.support.metrics import values
from tests.support.redis_process import RedisProcess
from tests.support.reward_server import RewardServer
from tests.support.scored_buffer import sections, statuses
from tests.support.waits import until

KEYS = Keys("test")


# ---- numbers that are too large are refused ------------------------------------------------------------------------


def open_eval(buffer: BufferThread) -> tuple[BufferClient, EvalInfo, list[Lease]]:
    client = buffer.client()
    client.upload_prompts(make_prompts(2, 3))
    info = request_eval(client, start_lineage(client))
    return client, info, [item for item in lease(client, 6).leases if item.kind != "train"]


def result_of(item: Lease, **fields: Any) -> dict[str, Any]:
    num = item.num_rollouts
    return {"lease_id": item.lease_id, "rewards": [1.0] * num, "num_response_tokens": [5] * num, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"rewards": [1e308, 1e308]},
        {"rewards": [-1e16, 1.0]},
        {"num_response_tokens": [10**3999, 1]},
        {"num_response_tokens": [2**80, 1]},
        {"num_response_tokens": [-1, 1]},
        {"log_ratios": [1e308, 1e308]},
        {"distinct_1": 1e308},
        {"embedding_distance": -1e308},
    ],
)
def test_results_of_an_evaluation_with_huge_numbers_are_refused_and_nothing_else_notices(
    serve_buffer: ServeBuffer, fields: dict[str, Any]
) -> None:
    client, info, leases = open_eval(serve_buffer())
    path = f"/v1/evals/{info.eval_id}"
    for item in leases:
        extreme = result_of(item, **(fields if item.kind == "sample" else {}))
        body = {"searcher_id": "s1", "version": "0-0", "results": [extreme]}
        status, answer = ask(client.base_url, f"{path}/results", "POST", body)
        assert status == (422 if item.kind == "sample" else 204), answer
    read_everything(client.base_url, path)
    assert client.get_eval(info.eval_id).state == "pending"


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
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(2))
    start_lineage(client)
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
    client = serve_buffer(**sections(reward)).client()
    client.upload_prompts(make_prompts(1))
    start_lineage(client)
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


@pytest.mark.parametrize(
    "setting",
    [
        '{"eval_every_steps": 1%s}' % ("0" * 400),
        '{"eval_every_steps": 1%s}' % ("0" * 3999),
        '{"beta": {"kind": "linear", "value": 1.0, "final": 0.5, "steps": 1%s}}' % ("0" * 400),
        '{"learning_rate": {"value": 0.001, "warmup_steps": 1%s}}' % ("0" * 350),
        '{"sampling_temperature": 1e308}',
    ],
)
def test_a_setting_that_is_too_large_is_refused(serve_buffer: ServeBuffer, setting: str) -> None:
    client = serve_buffer().client()
    start_lineage(client)
    status, answer = ask(client.base_url, "/v1/run/settings", "PATCH", f'{{"settings": {setting}}}')
    assert status == 422, answer
    read_everything(client.base_url)
    assert client.settings().revision == 0


# ---- stored items that cannot be read fail alone -------------------------------------------------------------------


def unreadable(client: BufferClient) -> dict[str, int]:
    found = client.run().damaged
    return {} if found is None else found.num


def store(server: RedisProcess) -> Redis:
    return Redis.from_url(server.url)


@pytest.mark.parametrize(
    "stored",
    [
        b'{"rewards": [1e308, 1e308], "num_response_tokens": [1, 1]}',
        b'{"rewards": [1.0, 1.0], "num_response_tokens": [1%s, 1]}' % (b"0" * 3999),
        b'{"rewards": [NaN, 1.0], "num_response_tokens": [1, 1]}',
        b'{"rewards": "many"}',
        b"\xff\x00 no JSON",
        b"null",
    ],
)
def test_a_stored_result_that_cannot_be_read_is_unknown_and_the_evaluation_ends(
    serve_buffer: ServeBuffer, redis: RedisProcess, stored: bytes
) -> None:
    client, info, leases = open_eval(serve_buffer())
    bad = f"{info.eval_id}|sample|0"
    with store(redis) as known:  # an older buffer accepted this
        known.hset(KEYS.eval_results, bad, stored)
        known.hset(KEYS.eval_done, info.eval_id, 1)
    for item in leases:
        if not item.visit_id.endswith("-sample-0"):
            body = {"searcher_id": "s1", "version": "0-0", "results": [result_of(item)]}
            assert ask(client.base_url, f"/v1/evals/{info.eval_id}/results", "POST", body)[0] == 204
    read_everything(client.base_url, f"/v1/evals/{info.eval_id}")
    done = client.get_eval(info.eval_id)
    assert (done.state, done.accuracy, done.num_unknown, done.mean_reward) == ("done", 1.0, 2, 1.0)
    assert named(client) == {("result", bad)}
    again = serve_buffer().client()
    assert unreadable(again) == {"result": 1}, "it is known after a restart, too"
    assert values(again.base_url, "tba_damaged_items") == {("result",): 1.0}


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\x00",
        b"[]",
        b'{"eval_id": "x"}',
        b'{"eval_id": "eval-0-0-3-2", "version": "0-0", "state": "done", "num_prompts": 3, "num_samples": 2,'
        b' "success_reward": 1.0, "created_at_s": 1.0, "deadline_s": 2.0, "summary": {"accuracy": Infinity}}',
    ],
)
def test_an_evaluation_that_cannot_be_read_has_failed_and_can_be_asked_for_again(
    serve_buffer: ServeBuffer, redis: RedisProcess, damage: bytes
) -> None:
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(2, 3))
    lineage = start_lineage(client)
    info = request_eval(client, lineage)
    with store(redis) as known:
        known.hset(KEYS.evals, info.eval_id, damage)
    read_everything(client.base_url, f"/v1/evals/{info.eval_id}")
    assert client.get_eval(info.eval_id).state == "failed"
    assert named(client) == {("evaluation", info.eval_id)}
    assert {item.kind for item in lease(client, 4).leases} == {"train"}, "others work on"
    if b'"done"' not in damage:
        assert request_eval(client, lineage).state == "pending"
        assert client.run().evals[0].state == "pending"


def damage_everything(server: RedisProcess, rollout_id: str, what: bytes) -> None:
    with store(server) as known:
        known.hset(KEYS.payloads, bytes.fromhex(rollout_id), what)
        known.hset(KEYS.components, "s-bad", what)
        known.hset(KEYS.run, "change", what)
        known.hset(KEYS.counters, "generated", what)
        known.hset(KEYS.ages, "3", what)
        known.hset(KEYS.ages, "old", "3")
        known.hset(KEYS.trainer_waits, "total:batch", what)
        known.hset(KEYS.scaling_reached, "1", what)
        known.rpush(KEYS.run_changes, what)
        known.rpush(KEYS.settings_changes, what)
        known.rpush(KEYS.scaling_changes, what)
        known.zadd(KEYS.settings_effects, {what: 1})
        known.lpush(KEYS.ledger, what)
        known.set(KEYS.rescore, what)


@pytest.mark.parametrize("what", [b"\xff\x00", b"{}", b"[1]", b"1" * 5000])
def test_each_stored_item_that_cannot_be_read_is_named_and_everything_else_is_served(
    serve_buffer: ServeBuffer, redis: RedisProcess, what: bytes
) -> None:
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(2, 3))
    start_lineage(client)
    client.push([encode_rollout(make_rollout(reward=float(i))) for i in range(3)])
    rollout_id = client.list_rollouts().rollouts[0].rollout_id
    damage_everything(redis, rollout_id, what)
    client = serve_buffer().client()
    read_everything(client.base_url)
    assert ask(client.base_url, "/readyz")[0] == 200, "what is damaged fails alone"
    page = {item.rollout_id: item for item in client.list_rollouts().rollouts}
    assert len(page) == 3
    bad = page.pop(rollout_id)
    assert (bad.reward, bad.reward_status, bad.num_response_tokens, bad.prompt_id) == (None, "failed", 3, "train-0")
    assert str(bad.reward_reason).startswith("unreadable")
    assert client.get_rollout(rollout_id).response_tokens == []
    assert {item.reward_status for item in page.values()} == {"scored"}
    kinds = set(unreadable(client))
    assert {"rollout", "component", "change", "counter", "ledger", "job"} <= kinds, kinds
    assert [line.kind for line in client.ledger().entries] == ["resume"]


def test_a_component_that_cannot_be_read_beats_on(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    client = serve_buffer().client()
    with store(redis) as known:
        known.hset(KEYS.components, "s-bad", b"\xff")
    client.heartbeat(Heartbeat(component_id="s-bad", kind="searcher", run="test", state="x", version=None, wait=None))
    assert {item.component_id: item.kind for item in client.run().components}["s-bad"] == "searcher"
    assert ("component", "s-bad") in named(client)


def answers_or_says_why(url: str) -> None:
    """Check that each call is answered, or gets a reason and leave to try again."""
    calls = {
        "/v1/leases": {"searcher_id": "s", "max_leases": 1},
        "/v1/samples": {"num": 1},
        "/v1/run/pause": {},
        "/v1/run/resume": {},
    }
    for path, body in calls.items():
        status, answer = ask(url, path, "POST", body)
        assert status < 500 or (status == 503 and b"cannot be read" in answer), (path, status, answer)


@pytest.mark.parametrize(("field", "value"), [("revision", b"\xff"), ("revision", b"x"), ("value:beta", b"\xff")])
def test_live_settings_that_cannot_be_read_are_no_fault_of_who_asks_for_a_lease(
    serve_buffer: ServeBuffer, redis: RedisProcess, field: str, value: bytes
) -> None:
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(2, 3))
    start_lineage(client)
    client.change_settings(SettingsRequest(settings=LiveSettings(eval_every_steps=7)))
    with store(redis) as known:
        known.hset(KEYS.settings, field, value)
        if field != "revision":  # known fields are not read again
            known.hset(KEYS.settings, "revision", 9)
    for path in READS:
        assert ask(client.base_url, path)[0] in (200, 404, 409, 422, 503), path
    assert ask(client.base_url, "/v1/run")[0] == 200
    status, answer = ask(client.base_url, "/v1/leases", "POST", {"searcher_id": "s", "max_leases": 1})
    assert (status, b"restore Redis" in answer or b"cannot read" in answer) == (503, True), answer


def test_an_id_of_an_evaluation_that_is_no_text_hides_no_other(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    client, info, _ = open_eval(serve_buffer())
    with store(redis) as known:
        known.rpush(KEYS.eval_order, b"\xff\xfe")
    assert [item.eval_id for item in client.run().evals] == [info.eval_id]


UNREADABLE_FIELDS = [
    ("state", b"\xff"),
    ("lineage", b"many"),
    ("step", b"1e9"),
    ("step", b"-1"),
    ("step", b"9" * 40),
    ("sampling_version", b""),
    ("latest_version", b"\xff"),
    ("checkpoint", b""),
]


@pytest.mark.parametrize(("field", "value"), UNREADABLE_FIELDS)
def test_what_says_how_the_run_stands_makes_the_service_not_ready(
    serve_buffer: ServeBuffer, redis: RedisProcess, field: str, value: bytes
) -> None:
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(2, 3))
    start_lineage(client)
    with store(redis) as known:
        known.hset(KEYS.run, field, value)
    for path in READS:
        if path != "/readyz":
            assert ask(client.base_url, path)[0] < 500, path
    answers_or_says_why(client.base_url)
    status, answer = ask(client.base_url, "/readyz")
    assert status == 503
    assert f"cannot be read ({field})" in json.loads(answer)["detail"]


def test_a_reward_that_an_older_buffer_stored_is_failed_and_named(
    serve_buffer: ServeBuffer, redis: RedisProcess
) -> None:
    buffer = serve_buffer()
    client = buffer.client()
    client.upload_prompts(make_prompts(2, 3))
    start_lineage(client)
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
    assert {name for _, name in named(client)} == {item.rollout_id for item in pushed.outcomes[:2]}
    assert [item.reward_status for item in client.list_rollouts(order="oldest").rollouts] == [
        "failed",
        "failed",
        "scored",
    ]


def test_a_pending_rollout_that_cannot_be_read_is_failed_and_the_others_are_scored(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    reward.gate.clear()
    first = serve_buffer(**sections(reward, buffer={"score_every_s": 1000.0}))
    client = first.client()
    client.upload_prompts(make_prompts(1))
    start_lineage(client)
    client.push([encode_rollout(make_rollout(reward=None)) for _ in range(4)])
    bad = client.list_rollouts(order="oldest").rollouts[0].rollout_id
    with store(redis) as known:
        known.hset(KEYS.payloads, bytes.fromhex(bad), b"\xff\x00")
    reward.gate.set()
    first.stop()
    client = serve_buffer(**sections(reward)).client()
    until("the others are scored", lambda: statuses(client) == (3, 0, 1))
    assert named(client) == {("rollout", bad)}
    again = serve_buffer(**sections(reward)).client()
    assert statuses(again) == (3, 0, 1), "the log says so"


def test_a_prompt_that_cannot_be_read_is_neither_leased_nor_in_the_way(
    serve_buffer: ServeBuffer, redis: RedisProcess
) -> None:
    client = serve_buffer().client()
    client.upload_prompts(make_prompts(3))
    start_lineage(client)
    client.push([encode_rollout(make_rollout("train-1"))])
    with store(redis) as known:
        known.hset(KEYS.prompts, "train-1", b'{"data": {"answer": 1%s}}' % (b"0" * 5000))
    client = serve_buffer().client()
    read_everything(client.base_url)
    assert named(client) == {("prompt", "train-1")}
    assert {item.prompt.prompt_id for item in lease(client, 6).leases} == {"train-0", "train-2"}
    assert client.list_rollouts(prompt_id="train-1").rollouts[0].prompt_id == "train-1"
