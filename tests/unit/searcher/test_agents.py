"""Agents that ask for replies by HTTP: which tokens are stored, what trains, limits and failures."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tba_searcher.engines.engine import Request
from tba_searcher.episodes import runner as runner_module
from tba_searcher.episodes import worker_pool
from tba_searcher.episodes.endpoint import Endpoint
from tba_searcher.episodes.recorder import CallRefusedError, Recorder

from tba.wire import Sampling
from tests.support.chat_tokenizers import thinking_template
from tests.support.episodes import CUT, Stage, codec_of, prompt_of, recipe_of, stage
from tests.unit.searcher.test_episodes import call, stored, words

AGENT = {"environment": "tests.support.environments:Scripted"}
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(worker_pool, "PING_S", 0.5)


def shape(played: Any) -> list[list[tuple[str, int, bool]]]:
    """Return origin, turn and whether it trains of each segment of each sequence."""
    stored(played)  # the rules of the wire hold
    return [[(each.origin, each.turn, each.is_trained) for each in found.segments] for found in played.sequences]


async def play(
    script: list[Any], *, policy: Any = words, section: Any = None, template: str | None = None, **data: Any
):
    kind = {} if template is None else {"template": template}
    async with stage({**AGENT, **(section or {})}, policy, **kind) as world:
        (played,) = await world.play(prompt_of(1, script=script, **data))
    return played, world


async def test_a_conversation_of_an_agent_is_one_sequence_of_the_tokens_that_were_sampled() -> None:
    played, world = await play([["say", "one"], ["say", "two"], ["say", "three"]])
    (segments,) = shape(played)
    assert [each for each in segments if each[0] == "policy"] == [("policy", turn, True) for turn in range(3)]
    tokens = played.sequences[0].tokens.tolist()
    for request, span in zip(world.requests, played.sequences[0].trained_spans, strict=True):
        assert list(request.prompt_tokens) == tokens[: span[0]]
    assert [request.continues for request in world.requests] == [
        None,
        world.requests[0].request_id,
        world.requests[1].request_id,
    ]
    text = codec_of().decode([tokens])[0]
    assert text.count("<|im_start|>user") == 3
    assert text.rstrip().endswith("word 2<|im_end|>")
    assert played.episode.stop_condition == "stop:word 0|stop:word 1|stop:word 2"
    assert played.episode.turn_rewards == (None, None, 1.0)
    assert [(each.role, each.content) for each in played.episode.messages] == [
        ("user", "one"),
        ("assistant", "word 0"),
        ("user", "two"),
        ("assistant", "word 1"),
        ("user", "three"),
        ("assistant", "word 2"),
    ]


async def test_a_rewritten_history_and_an_earlier_point_are_paths_that_train_each_reply_once() -> None:
    played, _ = await play([["say", "one"], ["say", "two"], ["edit", 1, "other"], ["say", "three"]])
    first, second = shape(played)
    assert [each for each in first if each[0] == "policy"] == [("policy", 0, True), ("policy", 1, True)]
    assert [each for each in second if each[0] == "policy"] == [("policy", 2, True)]
    # back to the first reply, and on with another question: what both paths share is trained in one
    played, _ = await play([["say", "one"], ["say", "two"], ["back", 2], ["say", "three"]])
    first, second = shape(played)
    assert [each for each in second if each[0] == "policy"] == [("policy", 0, False), ("policy", 2, True)]
    assert (
        played.sequences[1].tokens.tolist()[: sum(each.num_tokens for each in played.sequences[1].segments[:2])]
        == (played.sequences[0].tokens.tolist()[: sum(each.num_tokens for each in played.sequences[0].segments[:2])])
    )


async def test_a_reply_that_was_asked_for_again_trains_only_if_the_agent_went_on_from_it() -> None:
    replies = iter(["first", "second", "third"])
    played, world = await play([["say", "one"], ["again"], ["say", "two"]], policy=lambda *_: next(replies))
    (segments,) = shape(played)
    assert len([each for each in segments if each[0] == "policy"]) == 2
    assert played.text == "third"
    assert "first" not in codec_of().decode([played.sequences[0].tokens.tolist()])[0]
    assert world.status.counts["agent_calls_dropped"] == 1


async def test_an_idempotency_key_returns_the_stored_answer() -> None:
    played, world = await play([["say", "one"], ["same", True]])
    assert len(world.requests) == 2
    assert played.episode.stop_condition == "stop:word 0|stop:word 1|stop:word 1"
    _, world = await play([["say", "one"], ["same", True], ["say", "two"], ["same", True]])
    assert len(world.requests) == 4, "a key that comes again with another body is another call"


async def test_calls_of_tools_are_calls_and_a_cut_or_broken_one_is_text() -> None:
    said = iter([call("add", a=1), call("add", a=2) + CUT, "<tool_call>{</tool_call>", "end"])
    played, _ = await play(
        [["say", "one"], ["back", 2], ["say", "two", {"max_tokens": 40}], ["back", 2], ["say", "three"]],
        policy=lambda *_: next(said),
        template=thinking_template(),
        tools=[SCHEMA],
    )
    kinds = [each.partition(":") for each in played.episode.stop_condition.split("|")]
    assert [each[0] for each in kinds] == ["tool_calls", "length", "stop"]
    assert kinds[0][2] == ""
    assert "<tool_call>" in kinds[1][2]
    statuses = [s.parse_status for each in played.sequences for s in each.segments if s.origin == "policy"]
    assert statuses == ["ok", "ok", "invalid_json"]
    assert not played.episode.is_truncated, "the limit was the agent's own"


@pytest.mark.parametrize(
    ("section", "script", "policy", "limit"),
    [
        ({"max_turns": 1}, [["say", "one"], ["say", "two"]], words, "max_turns"),
        ({"max_tokens": 120}, [["say", "one"]] * 9, words, "max_tokens"),
        ({}, [["say", "one"], ["say", "x" * 2000]], words, "max_prompt_tokens"),
        ({}, [["say", "one"]], lambda *_: " long" * 100, "max_response_tokens"),
        ({"episode_timeout_s": 2.0}, [["say", "one"], ["wait", 30]], words, "episode_timeout_s"),
    ],
)
async def test_limits_truncate_an_agent(section: Any, script: Any, policy: Any, limit: str) -> None:
    played, _ = await play(script, section={**section, "truncated_reward": -1.0}, policy=policy)
    assert (played.episode.stop_condition, played.episode.is_truncated) == (limit, True)
    assert played.failure is None
    assert played.episode.paid == (0.0 if limit == "max_response_tokens" else -1.0)
    shape(played)


@pytest.mark.parametrize(
    ("section", "script", "failure"),
    [
        ({}, [["say", "one"], ["raise"]], "judge step"),
        ({}, [["say", "one"], ["wrong_secret"]], "environment step"),
        ({}, [["say", "one", {"stream": True}]], "environment step"),
        ({}, [], "environment step"),
        ({"max_turns": 1}, [["say", "1"], ["session", "b"], ["say", "2"], ["say", "3"]], "environment step"),
        ({"max_tokens": 12}, [["say", "1"], ["raise"]], "judge step"),
        ({"turn_timeout_s": 0.3}, [["say", "one"], ["wait", 30]], "environment step"),
        ({"turn_timeout_s": 0.3}, [["say", "one"], ["block", 30]], "environment step"),
    ],
)
async def test_a_failure_of_an_agent_is_unknown_and_names_its_boundary(section: Any, script: Any, failure: str) -> None:
    played, world = await play(script, section=section)
    assert (played.failure or "").startswith(failure)
    assert world.status.counts[f"episodes_failed_{failure.split()[0]}"] == 3


async def test_a_time_limit_chooses_no_session_and_one_without_a_call_is_no_failure_of_ours() -> None:
    section = {"episode_timeout_s": 2.0, "truncated_reward": -1.0}
    played, _ = await play([["say", "one"], ["session", "b"], ["say", "two"], ["wait", 30]], section=section)
    assert (played.failure or "").startswith("limit step")
    played, world = await play([["say", "one"]], stored="b")  # the game ended before this seat's turn
    assert (played.failure, world.status.counts["episodes"]) == ("limit step: no reply in session 'b' (no call)", 1)


async def test_a_failure_of_the_engine_is_not_the_agents() -> None:
    async with stage(AGENT, words) as world:
        world.begin("lease-0", prompt_of(1, script=[["say", "one"]]))
        for _ in range(3):
            found: list[Any] = []
            while not found:
                found = world.runner.take_turns(1, pinned=None)
                await asyncio.sleep(0.01)
            assert world.runner.refuse(found[0].request_id, "too long")
        await world.until(lambda: bool(world.played))
    assert world.played["lease-0"][0].failure == "engine generate: too long"


async def test_a_reply_that_is_sampled_when_the_agent_ends_is_abandoned() -> None:
    async with stage(AGENT, words) as world:
        abandoned, settle = list[str](), world.runner.settle
        world.runner.on_abandoned = abandoned.append
        world.runner.settle = lambda completion: None if completion.request_id.endswith(".1") else settle(completion)
        (played,) = await world.play(prompt_of(1, script=[["say", "one"], ["leave", 3]]))
        await world.until(lambda: abandoned == ["lease-0/1.1.1"])
    assert played.episode.stop_condition == "stop:word 0"


async def test_the_conversation_of_the_named_seat_is_stored() -> None:
    played, _ = await play([["say", "one"]], session="a", seat=1)
    assert played.episode.seat == 1
    missing, _ = await play([["say", "one"]], session="a", stored="b")
    assert missing.failure is not None
    assert not missing.sequences or "no reply in session 'b'" in missing.failure


async def test_tokens_are_answered_with_tokens_and_the_log_prob_of_each() -> None:
    played, world = await play([["tokens", [5, 6, 7], {}], ["tokens", [9], {"max_tokens": 2}]])
    (segments,) = shape(played)
    assert [each[0] for each in segments] == ["environment", "policy", "environment", "policy"]
    tokens = played.sequences[0].tokens.tolist()
    assert tokens[:3] == [5, 6, 7]
    assert list(world.requests[1].prompt_tokens) == tokens[:-2]
    num = len(played.response_tokens) - 2
    assert played.episode.stop_condition == f"stop:{-0.5 * num:g}|length:-1"


def recorder_of(requests: list[Request], go: asyncio.Event) -> Recorder:
    async def sample(request: Request) -> Any:
        requests.append(request)
        await go.wait()
        return Stage(recipe_of(AGENT), words, codec_of())._completion(request)

    ids = {"request_id": "l/1.1", "prompt_tokens": (), "eos_ids": (), "sampling": Sampling.of(1.0)}
    request, codec = Request(**ids, max_response_tokens=1, min_response_tokens=5), codec_of()
    return Recorder(sample, request, renderer=codec.renderer({}), codec=codec, limits=(999, 100, 1000, 3))


@pytest.mark.parametrize(("num_tokens", "num_answered"), [(9, 2), (600, 1)])
async def test_limits_hold_for_calls_at_once(num_tokens: int, num_answered: int) -> None:
    requests, go = list[Request](), asyncio.Event()
    recorder = recorder_of(requests, go)
    go.set()
    first = (await recorder.reply_to_tokens("", [5] * num_tokens, 20)).tokens.tolist()
    go.clear()
    tasks = [asyncio.create_task(recorder.reply_to_tokens("", [*first, each], 1)) for each in (7, 8, 9)]
    await asyncio.sleep(0)
    go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(each, CallRefusedError) for each in found) == 3 - num_answered
    assert (requests[1].min_response_tokens, requests[1].max_response_tokens) == (1, 1), "no engine samples 5 of 1"


async def test_an_agent_may_shorten_a_history_that_was_too_long() -> None:
    recorder = recorder_of([], go := asyncio.Event())
    go.set()
    with pytest.raises(CallRefusedError):
        await recorder.reply_to_tokens("", [5] * 1000, 9)
    assert recorder.truncated == {"": "max_prompt_tokens"}
    await recorder.reply_to_tokens("", [5] * 9, 9)
    assert recorder.truncated == {}


async def test_a_reply_that_no_client_got_is_dropped_until_it_is_asked_for_again() -> None:
    requests, go, endpoint = list[Request](), asyncio.Event(), Endpoint(1099)
    recorder, until = recorder_of(requests, go), Stage(recipe_of(AGENT), words, codec_of()).until
    await endpoint.start()
    with endpoint.open("s", recorder):
        headers = {"Authorization": "Bearer s", "x-stainless-retry-count": "0"}
        asked = {"url": f"{endpoint.url}/v1/chat/completions", "json": {"messages": [{"role": "user", "content": "a"}]}}
        async with httpx.AsyncClient() as client:
            asking = asyncio.create_task(client.post(**asked, headers=headers))
            await until(lambda: bool(requests))
            asking.cancel()
            await until(lambda: not endpoint._server.server_state.connections)
            go.set()
            await until(lambda: bool(recorder.num_answered) and not recorder.conversation("").completions)
            await client.post(**asked, headers={**headers, "x-stainless-retry-count": "1"})
    assert len(recorder.conversation("").completions) == len(requests) == 1
    await endpoint.close()
