"""The worlds of several turns: who plays well is paid, and the starting models' chats are those of the searcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tba_reward.scorer import Item, params_of
from tba_reward.scorers.last_number import score as score_number
from tba_searcher.conversations.known_families import open_renderer
from transformers import AutoConfig, AutoTokenizer

from examples.worlds import conversations
from examples.worlds.calculator.prepare import WORLD as CALCULATOR
from examples.worlds.conversations import Episode, World, calls, episodes, says
from examples.worlds.guess_number import world as guess_number
from examples.worlds.guess_number.prepare import WORLD as GUESS_NUMBER
from examples.worlds.lookup.prepare import WORLD as LOOKUP
from examples.worlds.lookup.world import Town
from tba.api import Prompt
from tba.config import load_recipe
from tba.config.reward import LastNumberSpec
from tba.environments import Reply, Step, open_play

WORLDS = Path(__file__).parents[3] / "examples/worlds"
CONTENTS: dict[str, Callable[[Prompt], Any]] = {
    GUESS_NUMBER.name: lambda prompt: guess_number.drawn(prompt.data["seed"]),
    CALCULATOR.name: lambda prompt: prompt.text,
    LOOKUP.name: lambda prompt: ((town := Town(prompt.data["seed"])).question, town.second, town.answer),
}


@pytest.fixture(params=[GUESS_NUMBER, CALCULATOR, LOOKUP], ids=lambda world: world.name)
def world(request: pytest.FixtureRequest) -> World:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[World], Path]:
    """Makes a starting model of a few steps, whose tokenizer is that of a whole one."""

    def made(world: World) -> Path:
        path = tmp_path_factory.getbasetemp() / world.name
        steps = replace(world.clean, num_steps=1, batch_size=64)
        if not path.exists():
            conversations.make(replace(world, clean=steps, noisy=steps, num_clean=300), path)
        return path

    return made


def rewards(world: World, slip: float) -> list[float]:
    prompts = [prompt for prompt in world.prompts(1, 200, 0) if prompt.split == "heldout"]
    played = episodes(world, prompts, num=len(prompts), seed=0, slip=slip)
    return [reward_of(prompt, episode) for prompt, episode in zip(prompts, played, strict=True)]


def reward_of(prompt: Prompt, episode: Episode) -> float:
    """What the environment paid, else the reward of the scorer in the recipe."""
    if episode.reward is not None:
        return episode.reward
    item = Item(prompt=prompt.text, response=episode.messages[-1]["content"], data=prompt.data)
    found = score_number(item, params_of(LastNumberSpec(kind="last_number")))
    assert isinstance(found, float)
    return found


def test_a_perfect_player_is_always_paid_and_a_careless_one_seldom(world: World):
    assert set(rewards(world, 0.0)) == {1.0}
    careless = rewards(world, 1.0)
    assert set(careless) == {0.0, 1.0}
    assert 0.15 < sum(careless) / len(careless) < 0.45


def test_no_content_is_in_both_splits_and_the_same_prompts_are_made_again(world: World):
    first, again, other = (world.prompts(400, 100, seed) for seed in (0, 0, 1))
    assert first == again
    held, train = ([each for each in first if each.split == split] for split in ("heldout", "train"))
    assert (len(held), len(train)) == (100, 400)
    assert held == [each for each in other if each.split == "heldout"]
    assert train != [each for each in other if each.split == "train"]
    contents = [{CONTENTS[world.name](each) for each in prompts} for prompts in (held, train)]
    assert not contents[0] & contents[1]


def test_a_recipe_names_what_its_starting_model_was_shown(world: World):
    section = load_recipe(WORLDS / world.name / f"{world.name}.toml", environ={}).environments[world.name]
    make, _ = open_play(section.environment, section.tools, section.settings, what="environments")
    prompt = world.prompts(1, 1, 0)[0]
    found = [asyncio.run(play.reset(prompt.environment_seed, prompt.data)) for play in (make(), world.play())]
    assert found[0] == found[1]
    played = episodes(world, [prompt], num=1, seed=0, slip=0.0)[0]
    assert sum(each["role"] == "assistant" for each in played.messages) <= section.max_turns


def test_whole_episodes_have_the_tokens_and_calls_that_the_searcher_finds(
    world: World, folder: Callable[[World], Path]
):
    tokenizer: Any = AutoTokenizer.from_pretrained(folder(world))
    recipe = load_recipe(WORLDS / world.name / f"{world.name}.toml", environ={})
    renderer = open_renderer(tokenizer, {})
    prompts = world.prompts(20, 1, 0)
    played = [each for slip in (0.0, 1.0) for each in episodes(world, prompts, num=20, seed=0, slip=slip)]
    tools = played[0].tools
    assert (renderer.prove(), renderer.prove(tools)) == ({}, {})
    for episode in played:
        ids, labels = conversations.row_of(tokenizer, episode)
        at = [number for number, each in enumerate(episode.messages) if each["role"] == "assistant"]
        tokens = list(renderer.render(episode.messages[: at[0]], tools=tools).tokens)
        for number, end in zip(at, [*at[1:], None], strict=True):
            content = episode.messages[number]["content"]
            reply = [*tokenizer.encode(content, add_special_tokens=False), tokenizer.eos_token_id]
            assert labels[len(tokens) : len(tokens) + len(reply)] == reply
            assert len(tokens) <= recipe.searcher.max_prompt_tokens
            assert len(reply) <= recipe.searcher.max_response_tokens
            parsed = renderer.parse(tokens, reply, tools=tools)
            assert [call.status for call in parsed.tool_calls] == ["ok"] * content.count("<tool_call>")
            assert parsed.content == ("" if parsed.tool_calls else content)
            if end is not None:
                behind = renderer.bridge(tokens, reply, episode.messages[number + 1 : end], tools=tools)
                assert behind is not None
                tokens = [*tokens, *reply, *behind.tokens]
        assert ids[: len(tokens)] == tokens
        assert sum(label >= 0 for label in labels) == sum(
            len(tokenizer.encode(episode.messages[number]["content"], add_special_tokens=False)) + 1 for number in at
        )
    config = AutoConfig.from_pretrained(folder(world))
    longest = recipe.searcher.max_prompt_tokens + recipe.searcher.max_response_tokens
    assert longest <= config.max_position_embeddings
    assert "�" not in tokenizer.decode(tokenizer.encode("any text: {é}\n"))


def steps(world: World, replies: list[Reply]) -> list[Step]:
    async def all_of_them() -> list[Step]:
        play, prompt = world.play(), world.prompts(1, 1, 0)[0]
        await play.reset(prompt.environment_seed, prompt.data)
        return [await play.step(reply) for reply in replies]

    return asyncio.run(all_of_them())


def texts(found: list[Step]) -> list[str]:
    return [message["content"] for step in found for message in step.messages if not isinstance(message, str)]


def test_a_reply_that_is_no_number_costs_a_guess_and_the_last_one_ends_the_game():
    found = steps(GUESS_NUMBER, [says(text) for text in ("x", "0", "9999", "", "")])
    assert [step.reward for step in found] == [None] * 4 + [0.0]
    assert [step.done for step in found] == [False] * 4 + [True]
    assert texts(found) == ["no number", "higher", "lower", "no number"]


def test_wrong_calls_are_answered_by_errors_and_the_episode_goes_on():
    step = steps(CALCULATOR, [calls("add", a="one", b=2)])[0]
    assert (step.done, step.info["num_tool_errors"]) == (False, 1)
    found = steps(LOOKUP, [calls("find", name="Zed", key="boss"), calls("find", name="Ann", key="age"), says("Zed")])
    assert texts(found) == ["error: no Zed", "error: no age"]
    assert [step.reward for step in found] == [None, None, 0.0]
