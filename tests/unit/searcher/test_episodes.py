"""Episodes: tokens, limits, failures and their boundaries, with real worker processes and a policy in the test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_searcher.episodes import runner as runner_module
from tba_searcher.episodes import worker_pool

from tba.errors import ConfigError
from tba.versions import PolicyVersion
from tba.wire import Rollout, VersionSpan, decode_rollout, encode_heartbeat, encode_rollout, float32_bytes
from tba.wire.heartbeat import MAX_HEARTBEAT_BYTES
from tests.support.chat_tokenizers import thinking_template
from tests.support.episodes import CUT, ECHO, Stage, codec_of, prompt_of, recipe_of, stage

TOOLS = [f"tests.support.environments:{name}" for name in ("add", "note", "away", "long", "leave")]
ONE_TOOL = {"tools": TOOLS}
LONG = {"micro_batch_tokens": 100_000}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(worker_pool, "PING_S", 0.5)


def words(text: str, turn: int) -> str:
    return f"word {turn}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def stored(played: Any) -> Rollout:
    """Return what the buffer would read of an episode."""
    status = {"reward_status": "failed", "reward": None, "reward_reason": played.failure, "reward_version": None}
    if played.failure is None:
        status = {"reward_status": "pending", "reward": None, "reward_reason": "", "reward_version": None}
    rollout = Rollout(
        rollout_id=b"0" * 16,
        run="episodes",
        task="talk",
        prompt_id="p1",
        visit_id="v",
        sequences=played.sequences,
        response_text=played.text,
        version_spans=played.version_spans,
        sampling=played.sampling,
        logprob_bytes=float32_bytes(played.sampler_logprobs),
        ref_logprob=None,
        searcher_id="s",
        started_at_s=played.started_at_s,
        finished_at_s=played.finished_at_s,
        episode=played.episode,
        **status,
    )
    return decode_rollout(encode_rollout(rollout))


async def test_an_episode_is_one_sequence_of_replies_between_messages():
    async with stage({"environment": ECHO}, words) as world:
        (played,) = await world.play(prompt_of(5))
    rollout = stored(played)
    (sequence,) = rollout.sequences
    text = world.codec._tokenizer.decode(sequence.tokens.tolist(), skip_special_tokens=False)
    # what reset returned is the task: TRL #6067 lost it
    assert text == (
        "<|im_start|>user\nseed 5<|im_end|>\n<|im_start|>assistant\nword 0<|im_end|>\n"
        "<|im_start|>user\nyou said word 0<|im_end|>\n<|im_start|>assistant\nword 1<|im_end|>\n"
        "<|im_start|>user\nyou said word 1<|im_end|>\n<|im_start|>assistant\nword 2<|im_end|>"
    )
    assert [segment.origin for segment in sequence.segments if segment.is_trained] == ["policy"] * 3
    assert rollout.episode is not None
    assert rollout.episode.turn_rewards == (0.5, 0.5, 0.5)
    assert played.episode.paid == 1.5
    assert (rollout.episode.stop_condition, rollout.episode.is_truncated) == ("done", False)
    assert (rollout.episode.environment, rollout.episode.environment_version) == ("talk", "echo-1")
    assert [message.content for message in rollout.episode.messages][:3] == ["seed 5", "word 0", "you said word 0"]
    # a second end of sequence is no truncation (TRL PR #7039)
    assert not rollout.is_truncated


async def test_tokens_stay_as_sampled_where_the_tokenizer_would_write_others():
    """TRL #5144, NeMo Gym PR #1787: a second rendering has other tokens than those that were sampled."""

    class Spelled(Stage):
        def _completion(self, request: Any) -> Any:
            found = super()._completion(request)
            tokenizer = self.codec._tokenizer
            ids = [token for letter in "assistant" for token in tokenizer.encode(letter, add_special_tokens=False)]
            assert ids != tokenizer.encode("assistant", add_special_tokens=False)
            tokens = np.array([*ids, tokenizer.eos_token_id], np.int32)
            spans = (VersionSpan.of(self.version, 0, len(tokens)),)
            logprobs = np.full(len(tokens), -0.5, np.float32)
            return replace(found, response_tokens=tokens, sampler_logprobs=logprobs, version_spans=spans)

    world = Spelled(recipe_of({"environment": ECHO}), words, codec_of())
    try:
        await world.runner.start()
        (played,) = await world.play(prompt_of())
    finally:
        await world.runner.close()
    assert len(played.sequences) == 1
    trained = [played.sequences[0].tokens[a:b].tolist() for a, b in played.sequences[0].trained_spans]
    assert trained == [[*trained[0]]] * 3
    assert len(trained[0]) == len("assistant") + 1
    stored(played)


async def test_a_rewritten_history_begins_a_sequence_and_trains_no_reply_twice():
    """verl #6854, prime-rl #1334: a template that drops earlier reasoning."""
    template = thinking_template()

    def policy(text: str, turn: int) -> str:
        return f"<think>\nwell\n</think>\n\nword {turn}"

    async with stage({"environment": ECHO}, policy, template=template) as world:
        (played,) = await world.play(prompt_of())
    rollout = stored(played)
    assert len(rollout.sequences) == 3
    assert [segment.turn for each in rollout.sequences for segment in each.segments if segment.is_trained] == [0, 1, 2]
    last = world.codec._tokenizer.decode(rollout.sequences[-1].tokens.tolist(), skip_special_tokens=False)
    assert last.count("well") == 1


async def test_a_rewritten_history_keeps_its_tools():
    """nano-rlm PR #73: tools were left out after a history was rewritten."""
    replies = [f"<think>\nwell\n</think>\n\n{call('add', a=1, b=turn)}" for turn in range(2)] + ["done"]
    template = thinking_template().replace("loop.index0 > ns.last", "loop.last")
    section = {"num_slots": 8, "max_prompt_tokens": 1000, "max_response_tokens": 100}
    async with stage(ONE_TOOL, lambda text, turn: replies[turn], template=template, searcher=section) as world:
        (played,) = await world.play(prompt_of())
    assert len(played.sequences) > 1
    for sequence in played.sequences:
        assert "Add two numbers" in world.codec._tokenizer.decode(sequence.tokens.tolist())


async def test_replies_in_the_prompt_are_not_trained():
    """NeMo RL PR #2176, #1956: assistant messages of the prompt were trained."""
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    prompt = prompt_of().model_copy(update={"messages": said})
    async with stage({"environment": ECHO}, words) as world:
        (played,) = await world.play(prompt)
    (sequence,) = played.sequences
    first, *_ = sequence.trained_spans
    before = world.codec._tokenizer.decode(sequence.tokens[: first[0]].tolist())
    assert "two" in before
    assert "seed 1" in before
    assert len(sequence.trained_spans) == 3


async def test_tools_answer_and_the_first_reply_without_a_call_ends_the_episode():
    replies = [call("add", a=2, b="40") + call("add", a=1), "<tool_call>{no json</tool_call>", call("fly"), "it is 42"]
    async with stage(ONE_TOOL, lambda text, turn: replies[turn]) as world:
        (played,) = await world.play(prompt_of())
    rollout = stored(played)
    assert rollout.episode is not None
    shown = [message.content for message in rollout.episode.messages if message.role == "tool"]
    assert shown[0] == "42"
    assert all(text.startswith("error: ") for text in shown[1:])
    assert "b: Missing required argument" in shown[1]
    assert "add" in shown[3]  # the tools that there are
    statuses = [segment.parse_status for each in rollout.sequences for segment in each.segments if segment.is_trained]
    assert statuses == ["ok", "invalid_json", "unknown_tool", None]
    assert (rollout.episode.num_tool_calls, rollout.episode.stop_condition) == (4, "no_tool_call")
    assert played.episode.paid is None
    assert played.failure is None
    assert world.status.counts["tool_calls_failed"] == 3
    gauges = world.status.heartbeat().gauges
    # a reset and four replies
    assert (gauges["episodes/talk"], gauges["tool_calls/talk"], gauges["environment_answers/talk"]) == (1, 4, 5)
    assert 0 < gauges["tool_s/talk"] <= gauges["environment_s/talk"]
    world.status.counts.update({f"episodes/x{n}{'x' * 60}": 1 for n in range(100)})
    assert len(encode_heartbeat(world.status.heartbeat())) <= MAX_HEARTBEAT_BYTES  # a larger one would be refused
    # the prompt's text is the message of the user, where nothing else is
    assert rollout.episode.messages[0].content == "question 1"


async def test_a_call_that_was_cut_is_not_executed(tmp_path: Path):
    """pi #6285, mini-swe-agent #851."""
    path = tmp_path / "calls"
    whole = call("note", path=str(path))
    replies = {0: whole, 1: whole + CUT}
    async with stage({**ONE_TOOL, "truncated_reward": 0.0}, lambda text, turn: replies[turn]) as world:
        (played,) = await world.play(prompt_of())
    assert path.read_text() == "called\n"
    assert played.episode.is_truncated
    assert played.episode.stop_condition == "max_response_tokens"


async def test_the_answer_of_a_tool_is_cut_in_tokens_at_its_end():
    """verl #4918, PR #6313: characters for tokens, and the wrong side."""
    replies = [call("long", num=300), "ok"]
    async with stage({**ONE_TOOL, "max_tool_tokens": 10}, lambda text, turn: replies[turn]) as world:
        (played,) = await world.play(prompt_of())
    (answer,) = [message.content for message in played.episode.messages if message.role == "tool"]
    head, _, tail = answer.partition("\n[cut: ")
    assert head.startswith("word")
    assert "end" not in head
    assert len(world.codec._tokenizer(head, add_special_tokens=False)["input_ids"]) == 10
    assert tail.startswith("10 of ")


@pytest.mark.parametrize(
    ("limits", "searcher", "stop"),
    [
        ({"max_turns": 2}, {}, "max_turns"),
        ({"max_tokens": 60}, {}, "max_tokens"),
        ({}, {"max_prompt_tokens": 60}, "max_prompt_tokens"),
        ({"episode_timeout_s": 1e-9}, {}, "episode_timeout_s"),
    ],
)
@pytest.mark.parametrize("reward", [None, -1.0])
async def test_limits_truncate_and_the_recipe_says_what_that_is_worth(
    limits: dict[str, Any], searcher: dict[str, Any], stop: str, reward: float | None
):
    """prime-rl PR #1938: a negative max_tokens in a later turn. PR #1983: the engine cuts a prompt silently."""
    environment = {"environment": ECHO, "settings": {"turns": 100}, "truncated_reward": reward, **limits}
    section = {"num_slots": 8, "max_prompt_tokens": 400, "max_response_tokens": 100, **searcher}
    async with stage(environment, words, searcher=section) as world:
        (played,) = await world.play(prompt_of())
    assert played.episode.is_truncated
    assert played.episode.stop_condition == stop
    assert all(request.max_response_tokens >= 1 for request in world.requests)
    assert all(len(request.prompt_tokens) <= section["max_prompt_tokens"] for request in world.requests)
    num_tokens = sum(len(each.tokens) for each in played.sequences)
    assert num_tokens <= limits.get("max_tokens", 10_000)
    paid = sum(each or 0.0 for each in played.episode.turn_rewards)
    if reward is None:  # unknown, and never 0
        assert played.failure is not None
        assert played.failure.startswith("limit ")
        assert stop in played.failure
    else:
        assert played.failure is None
        assert played.episode.paid == paid
        assert played.episode.turn_rewards[-1] in (-1.0, -0.5)  # on top of what the turn paid
    assert world.status.counts["episodes"] == 1  # no attempt would differ
    stored(played)


async def test_a_first_prompt_beyond_the_limit_is_refused_at_once():
    section = {"num_slots": 8, "max_prompt_tokens": 5, "max_response_tokens": 10}
    async with stage({"environment": ECHO}, words, searcher=section) as world:
        (played,) = await world.play(prompt_of())
    assert played.is_hopeless
    assert played.sequences == ()
    assert not world.requests
    assert world.status.counts["episodes"] == 1


@pytest.mark.parametrize("when", ["begin", "step"])
@pytest.mark.parametrize("what", ["raise", "die", "sandbox", "tool", "judge"])
async def test_a_failure_of_ours_plays_the_episode_again(tmp_path: Path, when: str, what: str):
    """prime-rl PR #1416: environment errors were trained. Here they are counted, and another episode is played."""
    prompt = prompt_of(1, **{when: what, "once": str(tmp_path / "once"), "closed": str(tmp_path / "closed")})
    (closed := tmp_path / "closed").touch()
    async with stage({"environment": ECHO}, words) as world:
        (played,) = await world.play(prompt)
        # once each, but for the process that died
        await world.until(lambda: closed.read_text() == "closed\n" * (1 if what == "die" else 2))
    assert played.failure is None
    assert played.episode.paid == 1.5
    boundary = "environment" if what in ("raise", "die") else what
    assert world.status.counts[f"episodes_failed_{boundary}"] == 1
    assert world.status.counts["episodes"] == 2
    ids = {request.request_id.rsplit(".", 2)[1] for request in world.requests}
    assert "2" in ids  # the whole episode again
    assert world.status.waits.current() is None
    await world.until(lambda: "left-by-a-dead-worker" not in _processes(), 10.0)


async def test_a_failure_that_stays_is_unknown_and_never_zero():
    """NeMo RL PR #431, compose-rl #90."""
    async with stage({"environment": ECHO}, words) as world:
        played, without = await world.play(prompt_of(1, step="raise", at=2), prompt_of(2, begin="raise"))
    assert played.failure is not None
    assert played.failure.startswith("environment step: step raised ValueError: the environment is broken")
    assert stored(played).reward is None
    assert len(played.episode.turn_rewards) == 2
    # an episode without a reply leaves nothing to store
    assert without.sequences == ()
    gauges = world.status.heartbeat().gauges
    assert gauges["episodes_failed_environment/talk"] == gauges["episodes_failed_environment"]
    assert world.status.counts["episodes_failed_environment"] == 2 * runner_module.MAX_ATTEMPTS


async def test_odd_answers_of_an_environment_fail_their_episode_alone():
    """NeMo RL PR #3063: one strange turn stalled the collector."""
    odd = [prompt_of(1, silent=True), *(prompt_of(2 + n, pays=value) for n, value in enumerate(("much", [1.0], 1e300)))]
    messages = [[3], [{"content": "no role"}], [{"role": "agent", "content": "x"}], [{"role": "user", "content": 5}]]
    odd += [prompt_of(10 + n, says=each) for n, each in enumerate(messages)]
    async with stage({"environment": ECHO}, words) as world:
        silent, *others, good = await world.play(*odd, prompt_of(4))
    assert ["the reward" in (each.failure or "") for each in others[:3]] == [True] * 3
    assert ["message" in (each.failure or "") for each in others[3:]] == [True] * 4
    assert silent.failure is not None
    assert "step returned no messages" in silent.failure
    assert good.failure is None


def _processes() -> str:
    return subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout


async def test_an_environment_that_blocks_is_killed_with_what_it_started(tmp_path: Path):
    """verl #288, rllm #915: hanging rewards, zombies."""
    section = {"environment": ECHO, "turn_timeout_s": 0.5}
    async with stage(section, words) as world:
        (played,) = await world.play(prompt_of(step="block", once=str(tmp_path / "once")))
        assert played.failure is None
        await world.until(lambda: "left-by-a-tool" not in _processes(), 10.0)
    assert world.status.counts["episodes_failed_environment"] == 1


async def test_a_slow_thread_costs_its_episode_alone():
    section = {"environment": "tests.support.environments:Thread", "turn_timeout_s": 0.5}
    async with stage(section, words) as world:
        slow, *others = await world.play(prompt_of(1, sleep_s=30.0), *(prompt_of(n, sleep_s=0.05) for n in range(2, 8)))
    assert slow.failure is not None
    assert "more than 0.5 s" in slow.failure
    assert [each.failure for each in others] == [None] * 6
    assert world.status.counts["episodes_failed_environment"] == runner_module.MAX_ATTEMPTS


async def test_a_killed_worker_is_replaced_and_its_episodes_fail_together_as_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner_module, "MAX_PAUSE_S", 15.0)
    async with stage({"environment": ECHO}, words) as world:
        for number in range(24):
            world.begin(f"lease-{number}", prompt_of(number))
        await world.until(lambda: len(world.requests) >= 24)
        victim = world.runner._pools["talk"]._workers[0]._process
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        # 24 failures in a row would pause for 15 s
        await world.until(lambda: len(world.played) == 24, 12.0)
    assert [[each.failure for each in played] for played in world.played.values()] == [[None]] * 24


async def test_a_tool_cannot_end_its_process_thread_or_task_nor_can_half_a_character():
    half = call("leave", how="\ud83d")
    replies = [call("leave", how=how) for how in ("exit", "next", "cancel")] + [half, "done"]
    async with stage(ONE_TOOL, lambda text, turn: replies[turn]) as world:
        (played,) = await world.play(prompt_of())
    assert played.failure is None
    shown = [message.content for message in played.episode.messages if message.role == "tool"]
    assert [text.split(":")[0] for text in shown[:3]] == ["error"] * 3
    assert "SystemExit: 3" in shown[0]
    stored(played)


async def test_more_calls_than_a_reply_may_have_are_not_made(tmp_path: Path):
    path = tmp_path / "calls"
    section = {"num_slots": 8, "max_prompt_tokens": 20_000, "max_response_tokens": 20_000}
    many = call("note", path=str(path)) * 65
    async with stage(ONE_TOOL, lambda text, turn: "done" if turn else many, searcher=section, trainer=LONG) as world:
        (played,) = await world.play(prompt_of())
    assert played.failure is None
    assert not path.exists()


async def test_a_cancelled_start_leaves_a_pool_that_works():
    async with stage({"environment": ECHO}, words) as world:
        pool = world.runner._pools["talk"]
        pool._workers[0].kill("the test")
        world.begin("lease-x", prompt_of())
        await asyncio.sleep(0)
        world.runner.cancel("lease-x")
        await asyncio.sleep(0.2)
        (played,) = await world.play(prompt_of())
    assert played.failure is None


async def test_a_request_that_the_engine_refuses_fails_its_episode():
    async with stage({"environment": ECHO}, words) as world:

        def refuse(text: str, turn: int) -> str:
            if turn == 1:
                assert world.runner.refuse(world.requests[-1].request_id, "too hot")
            return "word"

        world.policy = refuse
        (played,) = await world.play(prompt_of())
    assert played.failure == "engine generate: too hot"
    assert world.status.counts["episodes_failed_engine"] == runner_module.MAX_ATTEMPTS
    assert not world.runner.refuse("lease-9/1", "not mine")


async def test_open_episodes_of_training_leave_room_for_an_evaluation():
    searcher = {"num_slots": 1, "max_prompt_tokens": 400, "max_response_tokens": 100}
    async with stage({"environment": ECHO, "settings": {"turns": 1000}}, words, searcher=searcher) as world:
        while world.runner.has_room(None):
            world.begin(f"lease-{world.runner.num_open}", prompt_of(world.runner.num_open))
        assert world.runner.num_open == runner_module.EPISODES_PER_SLOT
        assert world.runner.has_room(PolicyVersion(1, 1))


async def test_workers_end_with_the_searcher():
    code = (
        "import asyncio, os, sys; from tests.support.episodes import *;"
        "s = Stage(recipe_of({'environment': ECHO}), None, codec_of()); loop = asyncio.new_event_loop();"
        "loop.run_until_complete(s.runner.start());"
        "print(list(s.runner._pools.values())[0]._workers[0]._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    found = await asyncio.to_thread(
        lambda: subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    )
    pid = int(found.stdout.split()[-1])
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            await asyncio.sleep(0.05)


async def test_versions_may_change_between_turns():
    async with stage({"environment": ECHO}, words) as world:

        def policy(text: str, turn: int) -> str:
            world.version = PolicyVersion(1, 1 + turn)
            return "word"

        world.policy = policy
        (played,) = await world.play(prompt_of())
    rollout = stored(played)
    assert [span.version.step for span in rollout.version_spans] == [1, 2, 3]
    assert rollout.version == PolicyVersion(1, 1)


async def test_cancelled_episodes_close_their_environment_and_leave_nothing(tmp_path: Path):
    async with stage({"environment": ECHO, "settings": {"turns": 1000}}, words) as world:
        world.begin("lease-a", prompt_of(1, closed=str(tmp_path / "closed")))
        world.begin("lease-b", prompt_of(2))
        await world.until(lambda: len(world.requests) > 4)
        world.runner.cancel("lease-a")
        await world.until(lambda: (tmp_path / "closed").exists())
        world.runner.cancel_all()
        await world.until(lambda: world.runner.num_open == 0)
        assert world.runner.take_turns(100, pinned=None) == []
    assert world.played == {}
    assert world.runner.num_resetting == 0


@pytest.mark.parametrize(
    "name", ["tests.support.environments:Missing", "no_such_module:Env", "tests.support.environments:NoEnvironment"]
)
async def test_an_unknown_environment_is_found_before_the_first_episode(name: str):
    """TRL PR #6002: an unknown environment failed in the middle of the run."""
    with pytest.raises(ConfigError, match=r"environments\.talk\.environment"):
        async with stage({"environment": name}, words):
            pass
