"""Tokens per CPU-second of the embedded engine and of transformers `generate`, side by side on the same requests.

    python benchmarks/bench_engine.py [--num-requests 256] [--rounds 3]

Two workloads on a model of about 1 M parameters, one thread, prompts of 10 to 16 tokens, 8 rollouts per prompt:
equal lengths (every response has 24 tokens) and variable lengths (1 to 40, as where responses end by themselves).
`generate` gets batches of 64 in order of arrival and runs each as long as its longest response; tokens beyond a
response's own limit do not count. Rounds of the two alternate, so that a busy machine slows both; the best is taken.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services" / "searcher")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tba_searcher.engines.base import Request  # noqa: E402
from tba_searcher.engines.embedded import EmbeddedEngine, EmbeddedSettings  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tba.versions import START  # noqa: E402
from tests.support.tiny_model import make_tiny_model  # noqa: E402

NUM_SLOTS = 64
ROLLOUTS_PER_VISIT = 8


def make_requests(num: int, *, variable: bool) -> list[Request]:
    """`num` seeded requests, `ROLLOUTS_PER_VISIT` per prompt; lengths in tokens: 24, or 1 to 40 if `variable`."""
    rng = np.random.default_rng(0)
    requests: list[Request] = []
    for i in range(num):
        if i % ROLLOUTS_PER_VISIT == 0:
            prompt = tuple(rng.integers(3, 33, rng.integers(10, 17)).tolist())
        length = int(rng.integers(1, 41)) if variable else 24
        requests.append(
            Request(request_id=str(i), prompt_tokens=prompt, temperature=1.0, max_response_tokens=length, eos_ids=())
        )
    return requests


def run_engine(folder: Path, requests: list[Request]) -> int:
    """Tokens per CPU second of the embedded engine; loading is not counted."""
    settings = EmbeddedSettings(num_slots=NUM_SLOTS, max_prompt_tokens=16, max_response_tokens=40, seed=0)
    engine = EmbeddedEngine(folder, START, settings)
    start = time.process_time()
    for request in requests:
        engine.submit(request)
    num_tokens = 0
    while engine.num_active + engine.num_waiting:
        num_tokens += sum(len(completion.response_tokens) for completion in engine.step())
    return int(num_tokens / (time.process_time() - start))


def run_generate(model: Any, requests: list[Request]) -> int:
    """Tokens per CPU second of transformers `generate`; tokens beyond a request's own length do not count."""
    start = time.process_time()
    for at in range(0, len(requests), NUM_SLOTS):
        batch = requests[at : at + NUM_SLOTS]
        longest = max(len(request.prompt_tokens) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            num = len(request.prompt_tokens)
            ids[row, longest - num :] = torch.tensor(request.prompt_tokens)
            mask[row, longest - num :] = 1
        most = max(request.max_response_tokens for request in batch)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                min_new_tokens=most,
                max_new_tokens=most,
                eos_token_id=None,
                pad_token_id=0,
            )
    num_tokens = sum(request.max_response_tokens for request in requests)
    return int(num_tokens / (time.process_time() - start))


def main() -> None:
    """Run the rounds and print the best of each, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder), hidden_size=128, num_layers=4, num_kv_heads=4)
        model: Any = AutoModelForCausalLM.from_pretrained(path).eval()
        model.generation_config.eos_token_id = None
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {NUM_SLOTS} slots")
        for name, variable in (("equal lengths", False), ("variable lengths", True)):
            requests = make_requests(args.num_requests, variable=variable)
            pairs = [(run_engine(path, requests), run_generate(model, requests)) for _ in range(args.rounds)]
            ours, theirs = (max(column) for column in zip(*pairs, strict=True))
            print(f"{name:18} engine {ours:6} tok/CPU-s   generate {theirs:6} tok/CPU-s   ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
