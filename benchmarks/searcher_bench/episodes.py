"""What the episode runner costs beside the engine, and whether slots are idle while an environment takes its time.

One engine, one environment whose episodes have NUM_TURNS turns, no services. `busy` is the share of the time in which
the engine's thread computes. With an environment that answers at once, the rest is what the runner costs. With one that
takes SLOW_S a turn, the tokens per second are compared with those of the quick one.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tba_searcher.engines.engine import ENGINE_TIMEOUT_S, EngineSettings, Request
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tba_searcher.episodes.runner import EPISODES_PER_SLOT, EpisodeRunner
from tba_searcher.generation import engine_thread
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.waits import WaitRegistry

from tba.api import Prompt
from tba.config import Recipe
from tba.environments import Reply, Reset, Step
from tba.versions import START
from tba.weights import LocalVersion
from tba.wire import Sampling
from tests.support.chat_tokenizers import make_talking_model

NUM_SLOTS, NUM_TURNS, REPLY_TOKENS, SLOW_S = 64, 4, 200, 0.5
END_LOGIT = 3.0
"""Replies of a random model then have about 24 tokens."""
MAX_OVERHEAD, MIN_SLOW = 0.05, 0.9


class Told:
    """Answers after `wait_s`, whatever it was told."""

    version = "1"

    def __init__(self, wait_s: float) -> None:
        self._wait_s, self._turn = wait_s, 0

    async def reset(self, seed: int, data: Any) -> Reset:
        """Begin."""
        await asyncio.sleep(self._wait_s)
        return Reset([f"Tell me about the number {seed}."])

    async def step(self, reply: Reply) -> Step:
        """Ask on."""
        await asyncio.sleep(self._wait_s)
        self._turn += 1
        return Step(["Go on."], 0.0, self._turn == NUM_TURNS)

    async def close(self) -> None:
        """Do nothing."""


async def play(model: Path, wait_s: float, round_s: float) -> dict[str, float]:
    """Play episodes for `round_s` after a warm-up; return the engine's share of the time and its tokens per second."""
    recipe = Recipe.model_validate(
        {
            "run": {"name": "bench"},
            "model": {"path": str(model)},
            "data": {"generator": "addition"},
            "environments": {
                "told": {"environment": "benchmarks.searcher_bench.episodes:Told", "settings": {"wait_s": wait_s}}
            },
            "searcher": {"num_slots": NUM_SLOTS, "max_prompt_tokens": 400, "max_response_tokens": REPLY_TOKENS},
        }
    )
    settings = EngineSettings(num_slots=NUM_SLOTS, max_prompt_tokens=400, max_response_tokens=REPLY_TOKENS, seed=0)
    engine, codec = EmbeddedEngine(model, START, settings), TextCodec(model)
    status = SearcherStatus(searcher_id="bench", run="bench", waits=WaitRegistry())
    runner, number, has_news = (
        EpisodeRunner(recipe, codec=codec, counts=status.counts, waits=status.waits),
        0,
        asyncio.Event(),
    )
    runner.on_turn = has_news.set
    thread = engine_thread.EngineThread(status.waits, timeout_s=ENGINE_TIMEOUT_S)
    current, busy_s, num_tokens = LocalVersion(START, None, ()), 0.0, 0  # type: ignore[arg-type]
    run_step = engine_thread.run_step

    def timed(*arguments: Any) -> Any:
        nonlocal busy_s
        begun_s = time.perf_counter()
        result = run_step(*arguments)
        busy_s += time.perf_counter() - begun_s
        return result

    engine_thread.run_step = timed
    try:
        await runner.start()
        begun_s = until_s = 0.0
        while not begun_s or time.perf_counter() < until_s:
            room = 2 * NUM_SLOTS - engine.num_active - engine.num_waiting
            requests = runner.take_turns(room, pinned=None)
            while len(requests) + runner.num_resetting < room and runner.has_room:
                number += 1
                prompt = Prompt(prompt_id=f"p{number}", task="told", text="?", data={"seed": number})
                request = Request(
                    request_id=f"lease-{number}/1",
                    prompt_tokens=(),
                    sampling=Sampling.of(1.0),
                    max_response_tokens=REPLY_TOKENS,
                    eos_ids=codec.eos_ids,
                )
                runner.begin(f"lease-{number}", prompt, request, None)
                await asyncio.sleep(0)
            if not requests and not engine.num_active + engine.num_waiting:
                has_news.clear()
                await asyncio.wait({asyncio.ensure_future(has_news.wait())}, timeout=0.05)
                continue
            step = engine_thread.EngineStep(None, requests, (), True)
            for completion in (await thread.run(engine, step, current)).completions:
                num_tokens += len(completion.response_tokens)
                runner.settle(completion)
            if not begun_s and status.counts["episodes"] >= NUM_SLOTS * (EPISODES_PER_SLOT if wait_s else 1):
                begun_s, busy_s, num_tokens = time.perf_counter(), 0.0, 0
                until_s = begun_s + round_s
        wall_s = time.perf_counter() - begun_s
        return {"busy": busy_s / wall_s, "tokens_per_s": num_tokens / wall_s}
    finally:
        engine_thread.run_step = run_step
        await runner.close()
        await thread.close(engine)


def measure(*, round_s: float) -> dict[str, Any]:
    """Return the results of the quick and of the slow environment."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_talking_model(Path(folder), end_logit=END_LOGIT, hidden_size=256, num_layers=4)
        quick, slow = (asyncio.run(play(model, wait_s, round_s)) for wait_s in (0.0, SLOW_S))
    ratio = slow["tokens_per_s"] / quick["tokens_per_s"]
    return {
        "answers at once": {**rounded(quick), "met": quick["busy"] >= 1 - MAX_OVERHEAD},
        f"takes {SLOW_S:g} s": {**rounded(slow), "of the quick one": round(ratio, 3), "met": ratio >= MIN_SLOW},
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Return values for people."""
    return {name: round(value, 3) for name, value in values.items()}
