"""Our loop over vLLM beside plain `LLM.generate`, on the same prompts, with new weights every few seconds.

A Llama of about 3 M parameters in float32, one thread, 64 slots, 8 rollouts per prompt, prompts of 16 to 48 tokens,
responses of 64. Both are in this process, with the same settings of vLLM, and take turns; tokens are counted over
wall time. The loop is the whole searcher but for HTTP: leases, text and tokens, scoring, rollouts encoded and pushed,
weights pulled from a store, loaded and verified. The pause of an update: benchmarks/weights.py.
"""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings
from tba_searcher.generation.delivery import Delivery
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.version_pulls import WeightLoader
from tba_searcher.generation.visits import WorkQueue
from tba_searcher.loop import SearcherLoop
from tba_searcher.waits import WaitRegistry

from benchmarks.searcher_bench.doubles import Buffer, Reward
from tba.config import Recipe, parse_recipe
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, WeightVersions
from tests.support.searcher_world import publish_version
from tests.support.tiny_model import make_tiny_model

NUM_SLOTS, ROLLOUTS_PER_VISIT, NUM_PROMPTS = 64, 8, 128
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS, RESPONSE_TOKENS = 16, 48, 64
MIN_RATIO = 0.95
"""Required share of the tokens per second of `LLM.generate`."""
WARM_S = 2.0


class LastingEngine(VllmEngine):
    """Stays open when a loop ends."""

    def close(self) -> None:
        """Abort all requests but stay open for the next round."""
        for request_id in list(self._requests):
            self.abort(request_id)


@dataclass(frozen=True)
class Rate:
    """The rates of one round."""

    per_s: float
    """Tokens per second."""
    per_cpu_s: float
    """Tokens per second of CPU time of this process, which a busy machine changes less."""


class Meter:
    """Tokens over time, from when it is made."""

    def __init__(self, num_tokens: int = 0) -> None:
        self._start_s, self._start_cpu_s, self._before = time.perf_counter(), time.process_time(), num_tokens

    def rate(self, num_tokens: int) -> Rate:
        """Return the rates with the tokens made so far."""
        made = num_tokens - self._before
        return Rate(made / (time.perf_counter() - self._start_s), made / (time.process_time() - self._start_cpu_s))

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start_s


def make_texts() -> list[str]:
    """The prompts: one token per character."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS + 1, NUM_PROMPTS)
    return ["".join(rng.choice(list("0123456789+-*/=?"), length)) for length in lengths]


def make_recipe(model: Path) -> Recipe:
    """Make a recipe with all that the loop reads."""
    document = {
        "run": {"name": "bench"},
        "model": {"path": str(model)},
        "data": {"generator": "addition"},
        "sampling": {"rollouts_per_visit": ROLLOUTS_PER_VISIT},
        "searcher": {
            "engine": "vllm",
            "num_slots": NUM_SLOTS,
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "max_response_tokens": RESPONSE_TOKENS,
            "drain_s": 1.0,
        },
    }
    return parse_recipe(document, where="bench")


class Ours:
    """The loop over one engine, run again in each round."""

    def __init__(self, folder: Path, texts: Sequence[str], *, num_updates: int, update_every_s: float) -> None:
        versions = WeightVersions(FileStore(folder / "store"), "bench")
        self._update_every_s, self._later = update_every_s, [PolicyVersion(1, step + 1) for step in range(num_updates)]
        models = [folder / "model-a", folder / "model-b"]
        for seed, model in enumerate(models):
            make_tiny_model(model, seed, hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=4)
        publish_version(versions, models[0], START)
        for number, version in enumerate(self._later):  # all beforehand: publishing is the trainer's work
            publish_version(
                versions, models[(number + 1) % 2], version, parent=self._later[number - 1] if number else START
            )
        self._loader = WeightLoader(versions, folder / "pulled")
        self._current, self.model = self._loader.download_model(START)
        self._recipe, self._buffer = (
            make_recipe(self.model),
            Buffer(texts, rollouts_per_visit=ROLLOUTS_PER_VISIT, latest=START),
        )
        self.codec = TextCodec(self.model)
        settings = VllmSettings(
            num_slots=NUM_SLOTS, max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=RESPONSE_TOKENS, seed=1
        )
        self.engine = LastingEngine(self.model, self._current.paths, START, settings)
        self.engine.verify(self._current.manifest)

    def rate(self, seconds: float) -> Rate:
        """Run the loop for so long, after warming up."""
        return asyncio.run(self._round(seconds))

    async def _round(self, seconds: float) -> Rate:
        stop, status = asyncio.Event(), SearcherStatus(searcher_id="bench", run="bench", waits=WaitRegistry())
        running = asyncio.create_task(self._loop(stop, status).run())
        updates = asyncio.create_task(self._update_forever())
        await asyncio.sleep(WARM_S)
        meter = Meter(status.counts["generated_tokens"])
        done, _ = await asyncio.wait([running, updates], timeout=seconds)
        rate = meter.rate(status.counts["generated_tokens"])
        updates.cancel()
        stop.set()
        await running
        if done or self._loader.refusals or not status.counts["rollouts_pushed"]:
            raise SystemExit(f"the loop did not run as it should: {dict(status.counts)}")
        self._current = self._loader.get(self.engine.version) or self._current
        return rate

    async def _update_forever(self) -> None:
        while True:
            await asyncio.sleep(self._update_every_s)
            if self._later:
                self._buffer.latest = self._later.pop(0)

    def _loop(self, stop: asyncio.Event, status: SearcherStatus) -> SearcherLoop:
        buffer, reward = cast(Any, self._buffer), cast(Any, Reward())
        delivery = Delivery(
            self._recipe,
            buffer=buffer,
            reward=reward,
            codec=self.codec,
            embedder=None,
            reference=None,
            status=status,
        )
        current = self._current
        assert isinstance(current, LocalVersion)
        return SearcherLoop(
            self._recipe,
            engine=self.engine,
            current=current,
            loader=self._loader,
            codec=self.codec,
            queue=WorkQueue(self._recipe.searcher, run_seed=0, eos_ids=()),
            buffer=buffer,
            heartbeats=buffer,
            delivery=delivery,
            status=status,
            stop=stop,
        )


class Plain:
    """`LLM.generate` with the settings of our engine, on a list of prompts as long as vLLM likes them."""

    def __init__(self, model: Path, prompts: Sequence[Sequence[int]]) -> None:
        import vllm

        self._llm = vllm.LLM(
            str(model), dtype="float32", enforce_eager=True, max_model_len=MAX_PROMPT_TOKENS + RESPONSE_TOKENS,
            max_num_seqs=NUM_SLOTS, block_size=32, distributed_executor_backend="uni", seed=1,
            kv_cache_memory_bytes=64 << 20, logprobs_mode="processed_logprobs", generation_config="vllm",
        )  # fmt: skip
        self._prompts: list[Any] = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        self._sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=RESPONSE_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
        )

    def rate(self, seconds: float) -> Rate:
        """Generate whole lists until the time is over."""
        meter, num_tokens = Meter(), 0
        while meter.seconds < seconds:
            outputs = self._llm.generate(self._prompts, self._sampling, use_tqdm=False)
            num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return meter.rate(num_tokens)


def measure(*, rounds: int = 3, round_s: float = 20.0, update_every_s: float = 10.0) -> dict[str, Any]:
    """Tokens per second of both in each round, and their ratio (median over rounds)."""
    texts, rounds_of_both = make_texts(), []
    with tempfile.TemporaryDirectory() as name:
        num_updates = int(rounds * (WARM_S + round_s) / update_every_s) + 1
        ours = Ours(Path(name), texts, num_updates=num_updates, update_every_s=update_every_s)
        prompts = [ours.codec.encode_prompt(text) for text in texts for _ in range(ROLLOUTS_PER_VISIT)]
        plain = Plain(ours.model, prompts)
        plain.rate(1.0)
        for _ in range(rounds):
            rounds_of_both.append((ours.rate(round_s), plain.rate(round_s)))
    if ours.engine.version == START:
        raise SystemExit("no update happened: make --round-s longer than --update-every-s")
    ratio = statistics.median(mine.per_s / other.per_s for mine, other in rounds_of_both)
    return {
        "loop_tokens_per_s": [round(mine.per_s) for mine, _ in rounds_of_both],
        "generate_tokens_per_s": [round(other.per_s) for _, other in rounds_of_both],
        "ratio": round(ratio, 3),
        "ratio_per_cpu_s": round(statistics.median(a.per_cpu_s / b.per_cpu_s for a, b in rounds_of_both), 3),
        "target_ratio": MIN_RATIO,
        "update_every_s": update_every_s,
        "met": ratio >= MIN_RATIO,
    }
