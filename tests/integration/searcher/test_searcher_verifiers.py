"""Environments of verifiers 0.4, played by its own code against the endpoint of a searcher."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_tokenizers import thinking_template
from tests.support.episodes import prompt_of, stage

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="the extra `verifiers` is not installed"
)
ENVIRONMENTS = os.environ.get("TBA_VERIFIERS_ENVIRONMENTS")
"""Folder `environments` of the repository of verifiers."""
needs_files = pytest.mark.skipif(
    ENVIRONMENTS is None, reason="set TBA_VERIFIERS_ENVIRONMENTS to the folder `environments` of verifiers' repository"
)
DUEL = """
import asyncio
import verifiers.v1 as vf

__all__ = ["Duel", "Numbers"]


class Row(vf.TaskData):
    number: int


class Number(vf.Task[Row]):
    @vf.reward
    async def is_told(self, trace: vf.Trace) -> float:
        if self.data.number == 1:
            await asyncio.sleep(60)
        if self.data.number == 2:
            raise ValueError("no judge")
        return float(str(self.data.number) in (trace.last_reply or ""))


class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    def load(self):
        return [Number(Row(idx=n, prompt=None, number=n)) for n in range(4)]


class DuelConfig(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, timeout={"scoring": 0.5})
    teller: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, timeout={"scoring": 0.5})


class Duel(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        async with agents.asker.interaction(task) as asker, agents.teller.interaction(task) as teller:
            for _ in range(2):
                asked = await asker.turn("Ask.")
                await teller.turn(f"{asked.last_reply} {task.data.number}")
"""


async def play(prompts: list[Any], policy: Any, folder: str, settings: dict[str, Any]) -> tuple[list[Any], Any]:
    section = {
        "environment": "tba.environments.adapters.verifiers:Verifiers",
        "settings": {"renderer": {"name": "qwen3"}, **settings},
    }
    sections = {
        "searcher": {"num_slots": 8, "max_prompt_tokens": 4000, "max_response_tokens": 300},
        "trainer": {"micro_batch_tokens": 8192},
    }
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, before])
    try:
        async with stage(section, policy, template=thinking_template(), **sections) as world:
            return await world.play(*prompts), world
    finally:
        os.environ["PYTHONPATH"] = before


async def test_each_seat_of_an_episode_is_a_rollout_and_an_unknown_reward_is_not_zero(tmp_path: Path) -> None:
    (tmp_path / "duel.py").write_text(DUEL)
    prompts = [prompt_of(number, idx=number % 4, seat=number // 4) for number in (0, 4, 5, 6, 7)]
    played, world = await play(
        prompts,
        lambda text, _: "told " + text.rsplit("user\n", 1)[1].split("<")[0],
        str(tmp_path),
        {"taskset": {"id": "duel"}},
    )
    asker, teller, late, broken, last = played
    assert [each.episode.seat for each in played] == [0, 1, 1, 1, 1]
    for each in (asker, teller, last):
        assert each.failure is None
        (sequence,) = each.sequences
        origins = [segment.origin for segment in sequence.segments]
        assert origins == ["environment", "policy", "environment", "policy"], "the second turn continues the first"
        sampled = [sequence.tokens.tolist()[start:end] for start, end in sequence.trained_spans]
        assert [token for reply in sampled for token in reply] == each.response_tokens.tolist()
    assert "Ask." in asker.episode.messages[0].content
    assert teller.episode.turn_rewards == (None, 1.0)
    assert late.failure.startswith("judge step: no reward is_told"), "its scoring timed out"
    assert broken.failure.startswith("judge step: TaskError")
    assert world.status.counts["agent_calls_dropped"] > 0, "the other seats' replies are counted"


@needs_files
async def test_kuhn_poker_pays_both_seats_the_opposite() -> None:
    folder = str(Path(ENVIRONMENTS or "", "kuhn_poker"))
    prompts = [prompt_of(number, idx=number // 2, seat=number % 2) for number in range(4)]

    def policy(text: str, _: int) -> str:
        return text.rsplit("Your legal actions: ", 1)[1].split(".")[0].split(" or ")[0]

    played, _ = await play(prompts, policy, folder, {"taskset": {"id": "kuhn_poker"}})
    paid = [each.episode.paid for each in played]
    assert paid[0] == -paid[1] != 0
    assert paid[2] == -paid[3] != 0


@needs_files
async def test_glossary_calls_its_tool_and_is_paid_for_the_fact() -> None:
    folder = str(Path(ENVIRONMENTS or "", "glossary"))

    def policy(text: str, _: int) -> str:
        if "<tool_response>" not in text:
            call = {"name": "facts_lookup", "arguments": {"name": text.rsplit('look up "', 1)[1].split('"')[0]}}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return text.rsplit("<tool_response>\n", 1)[1].split("\n</tool_response>")[0]

    played, _ = await play([prompt_of(n, idx=n) for n in range(2)], policy, folder, {"taskset": {"id": "glossary"}})
    for each in played:
        assert each.episode.turn_rewards == (None, 1.0)
        assert each.episode.num_tool_calls == 1
        assert len(each.sequences) == 1
