"""Generation with SmolLM2-135M on one core: the embedded engine, `generate` of transformers, and vLLM's `LLM.generate`.

    python studies/pretrained_speed.py [--rounds 3]

Each is a process of its own with one thread, in bfloat16, and they take turns. All get the same 32 prompts of
recipes/smollm2.toml with 4 answers each, at the recipe's temperature and length; a response ends at its end of
sequence. After one round to warm up, tokens count by wall time and by CPU time of the process. `generate` has batches
of 32 rows. Needs `make test`'s environment for vLLM.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("searcher", "trainer", "buffer", "reward"))]

from studies.markdown import markdown  # noqa: E402
from tba.config import load_recipe  # noqa: E402

ENGINES = ("embedded", "transformers", "vllm")
NUM_PROMPTS, NUM_ANSWERS, NUM_SLOTS = 32, 4, 32
Generate = Callable[[], list[int]]
"""Makes all answers; returns their lengths in tokens."""


def main() -> None:
    """Let the engines take turns, or measure one round of one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, help="measure this one, in this process")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.engine:
        print(json.dumps(_measure(args.engine)))
        return
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for _ in range(args.rounds):
        for engine in ENGINES:
            words = [sys.executable, __file__, "--engine", engine]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(words, env=environ, check=True, stdout=subprocess.PIPE, text=True)
            found[engine].append(json.loads(done.stdout.splitlines()[-1]))
    names = list(found["embedded"][0])
    print(markdown(["engine", *names], [[engine, *_row(rounds, names)] for engine, rounds in found.items()]))


def _row(rounds: Sequence[dict[str, float]], names: Sequence[str]) -> list[str]:
    values = [[each[name] for each in rounds] for name in names]
    return [f"{statistics.median(each):.3g} ({min(each):.3g} to {max(each):.3g})" for each in values]


def _measure(name: str) -> dict[str, float]:
    from tba_searcher.engines.tokenizer import TextCodec

    from tba_cli.prompts.reader import prompts_of

    recipe = load_recipe(ROOT / "recipes/smollm2.toml")
    codec = TextCodec(Path(recipe.model.path))
    prompts = [list(codec.prompt_tokens(prompt)) for prompt in prompts_of(recipe)[:NUM_PROMPTS]]
    limits = (recipe.searcher.max_prompt_tokens, recipe.searcher.max_response_tokens)
    make = {"embedded": _embedded, "transformers": _transformers, "vllm": _vllm}[name]
    generate = make(recipe.model.path, prompts, codec.eos_ids, limits, recipe.model.policy_temperature)
    generate()
    before_s, before_cpu_s = time.perf_counter(), time.process_time()
    num_tokens = sum(generate())
    return {
        "tokens per s": num_tokens / (time.perf_counter() - before_s),
        "tokens per CPU s": num_tokens / (time.process_time() - before_cpu_s),
        "tokens of an answer": num_tokens / (NUM_PROMPTS * NUM_ANSWERS),
        "peak memory, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _embedded(path: str, prompts: Any, eos_ids: Any, limits: tuple[int, int], temperature: float) -> Generate:
    from tba_searcher.engines.engine import EngineSettings, Request
    from tba_searcher.engines.torch.engine import EmbeddedEngine

    from tba.versions import START
    from tba.wire import Sampling

    settings = EngineSettings(
        num_slots=NUM_SLOTS, max_prompt_tokens=limits[0], max_response_tokens=limits[1], dtype="bfloat16", seed=0
    )
    engine = EmbeddedEngine(Path(path), START, settings)

    def generate() -> list[int]:
        for number, prompt in enumerate(prompts):
            for k in range(NUM_ANSWERS):
                engine.submit(
                    Request(
                        request_id=f"{number}-{k}",
                        prompt_tokens=tuple(prompt),
                        sampling=Sampling.of(temperature),
                        max_response_tokens=limits[1],
                        eos_ids=tuple(eos_ids),
                    )
                )
        lengths: list[int] = []
        while engine.num_active + engine.num_waiting:
            lengths += [len(done.response_tokens) for done in engine.step()]
        return lengths

    return generate


def _transformers(path: str, prompts: Any, eos_ids: Any, limits: tuple[int, int], temperature: float) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    rows = [prompt for prompt in prompts for _ in range(NUM_ANSWERS)]

    @torch.inference_mode()
    def generate() -> list[int]:
        lengths: list[int] = []
        for at in range(0, len(rows), NUM_SLOTS):
            batch = rows[at : at + NUM_SLOTS]
            longest = max(map(len, batch))
            ids = torch.tensor([[eos_ids[0]] * (longest - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            ends = {"max_new_tokens": limits[1], "eos_token_id": list(eos_ids), "pad_token_id": eos_ids[0]}
            answers = model.generate(ids, attention_mask=mask, **how, **ends)[:, longest:].tolist()
            lengths += [next((i + 1 for i, t in enumerate(row) if t in eos_ids), len(row)) for row in answers]
        return lengths

    return generate


def _vllm(path: str, prompts: Any, eos_ids: Any, limits: tuple[int, int], temperature: float) -> Generate:
    from tba_searcher.engines.vllm.environment import prepare_vllm

    prepare_vllm("cpu")
    import vllm

    llm = vllm.LLM(
        path, dtype="bfloat16", max_model_len=sum(limits), max_num_seqs=NUM_SLOTS, generation_config="vllm",
        distributed_executor_backend="uni", kv_cache_memory_bytes=512 << 20, enforce_eager=True,
    )  # fmt: skip
    how = vllm.SamplingParams(
        temperature=temperature, max_tokens=limits[1], n=NUM_ANSWERS, stop_token_ids=list(eos_ids), logprobs=0
    )

    def generate() -> list[int]:
        texts: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = llm.generate(texts, how, use_tqdm=False)
        return [len(answer.token_ids) for each in found for answer in each.outputs]

    return generate


if __name__ == "__main__":
    main()
