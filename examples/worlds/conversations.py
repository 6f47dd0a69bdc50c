"""Make the starting models of the worlds of several turns: small Llamas that converse in ChatML, and mostly fail.

Scripted players show the episodes, played with the environment and tools of the recipe. They learn from replies alone:
first those of a player without slips, until the skill is there; then those of one whose slips RL has to remove.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AddedToken, PreTrainedTokenizerFast

from examples.worlds import training
from examples.worlds.training import Sizes, Steps
from tba.api import Prompt
from tba.environments import Environment, Play, Reply, ToolCall, tool_of
from tba_cli.starter_models.starting_model import save

START, END = "<|im_start|>", "<|im_end|>"
OPENING = f"{START}assistant\n"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PIECES = r"\d|[A-Za-z]+ ?|[^A-Za-z\d]+"
"""A space belongs to the word before it, so that a name is one token wherever it stands."""
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{% set it = call.function or call -%}
<tool_call>{"name": "{{ it.name }}", "arguments": {{ it.arguments | tojson }}}</tool_call>
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML with calls in the form of Hermes. Of a tool it shows the names alone: schemas would be most of an episode."""

Player = Callable[[Sequence[dict[str, Any]], random.Random, float], Reply]
"""Replies to messages; each of its slips has a probability that is a part of the number given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What an episode of a world needs, and how its starting model is made."""

    name: str
    prompts: Callable[[int, int, int], list[Prompt]]
    player: Player
    environment: Callable[[], Environment] | None = None
    tools: tuple[Callable[..., Any], ...] = ()
    clean: Steps
    noisy: Steps
    num_clean: int = 3000
    """Different episodes of the first phase."""
    layers: int = 2

    def play(self) -> Play:
        """Return what plays an episode."""
        made = None if self.environment is None else self.environment()
        return Play(made, [tool_of(tool) for tool in self.tools])


@dataclass(slots=True)
class Episode:
    """The chat of an episode, and what the environment paid."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    reward: float | None = None


def says(text: str) -> Reply:
    """Return a reply that is a text."""
    return Reply(text, None, ())


def calls(name: str, /, **arguments: Any) -> Reply:
    """Return a reply that calls a tool."""
    raw = json.dumps({"name": name, "arguments": arguments})
    return Reply("", None, (ToolCall(raw, "ok", name, arguments),))


async def played(world: World, prompt: Prompt, rng: random.Random, slip: float) -> Episode:
    """Play an episode with the player of a world."""
    play = world.play()
    messages, tools = await play.reset(prompt.environment_seed, prompt.data)
    episode, done = Episode(messages or [{"role": "user", "content": prompt.text}], tools), False
    while not done:
        reply = world.player(episode.messages, rng, slip)
        raw = "".join(f"<tool_call>{call.raw}</tool_call>" for call in reply.tool_calls)
        new, reward, done, _ = await play.step(reply)
        episode.messages += [{"role": "assistant", "content": reply.content + raw}, *new]
        episode.reward = reward if episode.reward is None else episode.reward + (reward or 0.0)
    await play.close()
    return episode


def episodes(world: World, prompts: Sequence[Prompt], *, num: int, seed: int, slip: float) -> list[Episode]:
    """Play episodes of prompts, one after another."""
    rng = random.Random(seed)

    async def all_of_them() -> list[Episode]:
        return [await played(world, prompts[number % len(prompts)], rng, slip) for number in range(num)]

    return asyncio.run(all_of_them())


def chat_tokenizer(sizes: Sizes, shown: Sequence[Episode]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the marks of ChatML and of tool calls, a chat template, and a token for each word."""
    names = [
        f"{each['function']['name']}({', '.join(each['function']['parameters']['properties'])})"
        for each in shown[0].tools
    ]
    texts = ["system\nuser\nassistant\n", *names, *(message["content"] for each in shown for message in each.messages)]
    tokenizer = training.new_tokenizer(sizes, texts, pieces=PIECES)
    # as in models of Qwen: marks that a reply may hold are no special tokens
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.eos_token, tokenizer.chat_template = END, TEMPLATE
    return tokenizer


def row_of(tokenizer: Any, episode: Episode) -> tuple[list[int], list[int]]:
    """Return the tokens of an episode, and the same with -100 where nobody replies."""
    text = tokenizer.apply_chat_template(episode.messages, tools=episode.tools or None, tokenize=False)
    ids, labels, is_reply = list[int](), list[int](), False
    for part in re.split(f"(?<={re.escape(OPENING)})|(?<={re.escape(END)})", text):
        found = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids, labels = ids + found, labels + (found if is_reply else [-100] * len(found))
        is_reply = part.endswith(OPENING)
    return ids, labels


def _loss(model: Any, batch: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    longest = max(len(ids) for ids, _ in batch)
    ids, labels = (
        torch.tensor([[*row[part], *[fill] * (longest - len(row[part]))] for row in batch])
        for part, fill in enumerate((0, -100))
    )
    logits = model(input_ids=ids).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def make(world: World, folder: Path, *, seed: int = 0) -> None:
    """Make the starting model of a world."""
    train = [prompt for prompt in world.prompts(world.num_clean, 1, -1 - seed) if prompt.split == "train"]
    sizes = Sizes(
        family="llama",
        hidden=96,
        layers=world.layers,
        heads=4,
        inner=288,
        max_length_tokens=256,
        vocab_size=400,
        initializer_range=0.05,
        special_tokens=(START, END),
    )
    phases = [
        (world.clean, episodes(world, train, num=world.num_clean, seed=seed, slip=0.0)),
        (world.noisy, episodes(world, train, num=world.noisy.num_steps * world.noisy.batch_size, seed=seed, slip=1.0)),
    ]
    tokenizer = chat_tokenizer(sizes, [*phases[0][1][:1000], *phases[1][1][:1000]])
    model = training.new_model(sizes, tokenizer, seed=seed)
    for steps, shown in phases:
        rows = [row_of(tokenizer, each) for each in shown]
        training.learn(model, rows, steps, lambda batch: _loss(model, batch), seed=seed)
    save(folder, model, tokenizer)


def prepare(world: World) -> None:
    """Make the starting model of a world where its recipe expects it."""
    training.prepare({Path(f"models/worlds/{world.name}"): lambda folder: make(world, folder)})
