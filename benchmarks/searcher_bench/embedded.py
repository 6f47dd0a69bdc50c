"""The embedded engine beside `generate` of transformers: tokens per CPU second, greedy identity.

A Llama of about 3 M parameters in float32, one thread, 64 slots, 8 rollouts per prompt, prompts of 16 to 48 tokens.
Equal lengths: 64 tokens each. Variable lengths: geometric with mean 31, at most 128, as where responses end by
themselves. `generate` gets batches of 64 in order of arrival and runs each to its longest response; tokens beyond a
response's own limit do not count. Both alternate in one process, so that a busy machine slows both; loading is not
counted. Greedy: the engine's response to every request is that of the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tba_searcher.engines.engine import EngineSettings, Request
from tba_searcher.engines.torch.engine import EmbeddedEngine
from transformers import AutoModelForCausalLM

from tba.versions import START
from tba.wire import Sampling
from tests.support.tiny_model import make_tiny_model

NUM_SLOTS = 64
ROLLOUTS_PER_VISIT = 8
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 16, 48
EQUAL_TOKENS, MEAN_TOKENS, MAX_TOKENS = 64, 31, 128
MIN_RATIO = {"equal": 1.4, "variable": 3.0}
"""Ratio of the engine's tokens to those of `generate`."""
_PAD_ID = 0


def make_requests(num: int, *, lengths: str, temperature: float) -> list[Request]:
    """`num` seeded requests, `ROLLOUTS_PER_VISIT` per prompt, that end at their limit alone.

    Args:
        lengths: `equal` or `variable`.
    """
    rng = np.random.default_rng(0)
    requests: list[Request] = []
    prompt: tuple[int, ...] = ()
    for number in range(num):
        if number % ROLLOUTS_PER_VISIT == 0:
            num_prompt_tokens = rng.integers(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS + 1)
            prompt = tuple(rng.integers(3, 33, num_prompt_tokens).tolist())
        drawn = min(int(rng.geometric(1 / MEAN_TOKENS)), MAX_TOKENS)
        requests.append(
            Request(
                request_id=str(number),
                prompt_tokens=prompt,
                sampling=Sampling.of(temperature),
                max_response_tokens=EQUAL_TOKENS if lengths == "equal" else drawn,
                eos_ids=(),
            )
        )
    return requests


def run_engine(engine: EmbeddedEngine, requests: list[Request]) -> dict[str, list[int]]:
    """Responses by request id."""
    for request in requests:
        engine.submit(request)
    done: dict[str, list[int]] = {}
    while engine.num_active + engine.num_waiting:
        done |= {item.request_id: item.response_tokens.tolist() for item in engine.step()}
    return done


def run_generate(model: Any, requests: list[Request]) -> dict[str, list[int]]:
    """The same with transformers `generate`, in batches of `NUM_SLOTS`."""
    done: dict[str, list[int]] = {}
    for at in range(0, len(requests), NUM_SLOTS):
        batch = requests[at : at + NUM_SLOTS]
        longest = max(len(request.prompt_tokens) for request in batch)
        ids = torch.full((len(batch), longest), _PAD_ID)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            num = len(request.prompt_tokens)
            ids[row, longest - num :] = torch.tensor(request.prompt_tokens)
            mask[row, longest - num :] = 1
        most = max(request.max_response_tokens for request in batch)
        how = {"do_sample": False} if batch[0].sampling.temperature == 0 else {"do_sample": True, "top_k": 0}
        length = {"min_new_tokens": most, "max_new_tokens": most, "eos_token_id": None, "pad_token_id": _PAD_ID}
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=mask, **how, **length)[:, longest:].tolist()
        for request, row in zip(batch, output, strict=True):
            done[request.request_id] = row[: request.max_response_tokens]
    return done


def tokens_per_cpu_s(run: Any, requests: list[Request]) -> float:
    """Tokens of `requests` per second of CPU time of this process."""
    start = time.process_time()
    done = run(requests)
    taken_s = time.process_time() - start
    return sum(map(len, done.values())) / taken_s


def measure(*, num_requests: int = 256, rounds: int = 3) -> dict[str, dict[str, Any]]:
    """Per lengths: tokens per CPU second of both (best round), their ratio (median of rounds), and whether it is met.

    `greedy_identical` is the share of requests whose greedy responses are the same.
    """
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny_model(Path(name), hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=4)
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        model.generation_config.eos_token_id = None
        settings = EngineSettings(
            num_slots=NUM_SLOTS, max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=MAX_TOKENS, seed=0
        )
        engine = EmbeddedEngine(folder, START, settings)
        for lengths, least in MIN_RATIO.items():
            greedy = make_requests(NUM_SLOTS * 2, lengths=lengths, temperature=0.0)
            ours = run_engine(engine, greedy)
            theirs = run_generate(model, greedy)
            same = statistics.mean(ours[item.request_id] == theirs[item.request_id] for item in greedy)
            requests = make_requests(num_requests, lengths=lengths, temperature=1.0)
            rows = [
                (
                    tokens_per_cpu_s(lambda items: run_engine(engine, items), requests),
                    tokens_per_cpu_s(lambda items: run_generate(model, items), requests),
                )
                for _ in range(rounds)
            ]
            ratio = statistics.median(mine / other for mine, other in rows)
            found[lengths] = {
                "engine_tokens_per_cpu_s": max(row[0] for row in rows),
                "generate_tokens_per_cpu_s": max(row[1] for row in rows),
                "ratio": ratio,
                "target": least,
                "greedy_identical": same,
                "met": ratio >= least and same == 1.0,
            }
    return found
