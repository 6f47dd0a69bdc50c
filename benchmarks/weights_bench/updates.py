"""What a weight update costs generation: keys and values recomputed or kept, merged weights or an adapter.

    python -m benchmarks.weights_bench.updates speed vllm --size 0.1B --every 16      prints one JSON document
    python -m benchmarks.weights_bench.updates logprobs                               another, of the embedded engine

`speed`: all slots decode, and every so many steps the weights change; two random models in bfloat16 take turns, staged
as searchers do, which is not timed. Ways: `none` (no update), `recompute` and `keep` (`searcher.kv_at_update`), and of
vLLM `adapter`: the base stays, and `add_lora` replaces an adapter of rank 16 on every linear layer in place; keys and
values are recomputed. The ways take turns. Times are CPU seconds of one thread, so that other work on the machine
counts little: *load* and *canary* are the pause (an adapter has no canary), *step after* is the step that follows.

`logprobs`: the versions that benchmarks/weights.py has trained (build/weights-bench). Responses of 96 tokens live
through one update in their middle, in float32. Log-probs with kept keys and values, against those of the new version
alone.
"""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from benchmarks.weights_bench.pause import SIZES, EngineName, make_random_model
from benchmarks.weights_bench.training import VOCAB_SIZE

Way = Literal["none", "recompute", "keep", "adapter"]
NUM_SLOTS, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 64, 96
ENGINE_SIZES: dict[str, Any] = {
    "num_slots": NUM_SLOTS,
    "max_prompt_tokens": PROMPT_TOKENS,
    "max_response_tokens": RESPONSE_TOKENS,
}
LORA_RANK = 16
CANARY = ((4, 5, 6), (7, 8, 9, 10))
ROOT = Path(__file__).resolve().parents[2]


class MergedWeights:
    """An engine of the searcher that takes whole weights."""

    def __init__(self, name: EngineName, folders: list[Path], way: Way) -> None:
        from tba.versions import START

        kv_at_update: Any = "keep" if way == "keep" else "recompute"
        self._paths = [folder / "model.safetensors" for folder in folders]
        self._num_loads = 0
        if name == "embedded":
            from tba_searcher.engines.engine import EngineSettings
            from tba_searcher.engines.torch.engine import EmbeddedEngine

            settings = EngineSettings(**ENGINE_SIZES, seed=1, dtype="bfloat16", kv_at_update=kv_at_update)
            self._engine: Any = EmbeddedEngine(folders[0], START, settings)
        else:
            from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings

            own = VllmSettings(**ENGINE_SIZES, seed=1, dtype="bfloat16", kv_at_update=kv_at_update)
            self._engine = VllmEngine(folders[0], self._paths[:1], START, own)

    def submit(self, name: str, prompt: list[int]) -> None:
        """Begin a response of RESPONSE_TOKENS."""
        from tba_searcher.engines.engine import Request

        from tba.wire import Sampling

        self._engine.submit(
            Request(
                request_id=name, prompt_tokens=tuple(prompt), sampling=Sampling(temperature=1.0),
                max_response_tokens=RESPONSE_TOKENS, eos_ids=(),
            )
        )  # fmt: skip

    def step(self) -> int:
        """Decode one step; return how many responses it ended."""
        return len(self._engine.step())

    def prepare(self) -> None:
        """Do what happens beside generation."""
        self._engine.stage_weights([self._paths[(self._num_loads + 1) % 2]])

    def update(self) -> None:
        """Do what generation waits for."""
        from tba.versions import PolicyVersion

        self._num_loads += 1
        self._engine.load_weights([self._paths[self._num_loads % 2]], PolicyVersion(1, self._num_loads))

    def check(self) -> None:
        """Do what generation waits for after that."""
        self._engine.canary_logprobs(*CANARY)


class Adapters:
    """vLLM with a base that stays, and an adapter that is replaced in place. It has no canary."""

    def __init__(self, folders: list[Path], root: Path) -> None:
        from tba_searcher.engines.vllm.environment import prepare_vllm

        prepare_vllm("cpu")
        from vllm import EngineArgs, LLMEngine
        from vllm.lora.request import LoRARequest

        arguments = EngineArgs(
            model=str(folders[0]), dtype="bfloat16", max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
            max_num_seqs=NUM_SLOTS, block_size=32, enforce_eager=True, async_scheduling=False,
            kv_cache_memory_bytes=1 << 28, distributed_executor_backend="uni", logprobs_mode="processed_logprobs",
            generation_config="vllm", disable_log_stats=True, use_tqdm_on_load=False, enable_lora=True,
            max_lora_rank=LORA_RANK, max_loras=1,
        )  # fmt: skip
        self._llm: Any = LLMEngine.from_engine_args(arguments)
        paths = [_make_adapter(folders[0], root / f"adapter-{seed}", seed) for seed in (0, 1)]
        self._requests = [LoRARequest("adapter", 1, str(path), load_inplace=True) for path in paths]
        self._in_use = LoRARequest("adapter", 1, str(paths[0]))
        self._num_loads = 0
        self._llm.add_lora(self._requests[0])

    def submit(self, name: str, prompt: list[int]) -> None:
        """See `MergedWeights.submit`."""
        import vllm
        from vllm.sampling_params import RequestOutputKind

        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=RESPONSE_TOKENS, ignore_eos=True, logprobs=0, flat_logprobs=True,
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self._llm.add_request(name, vllm.TokensPrompt(prompt_token_ids=prompt), params, lora_request=self._in_use)

    def step(self) -> int:
        """See `MergedWeights.step`."""
        return sum(output.finished for output in self._llm.step())

    def prepare(self) -> None:
        """Nothing: vLLM reads the adapter in the pause."""

    def update(self) -> None:
        """See `MergedWeights.update`."""
        self._num_loads += 1
        self._llm.add_lora(self._requests[self._num_loads % 2])
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def check(self) -> None:
        """Nothing."""


def _make_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write an adapter in PEFT's format for every linear layer of a model."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    folder.mkdir()
    tensors, modules = {}, set()
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            modules.add(layer.rpartition(".")[2])
            prefix = f"base_model.model.{layer}"
            tensors[f"{prefix}.lora_A.weight"] = 0.02 * torch.randn(LORA_RANK, weight.shape[1], dtype=torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = 0.02 * torch.randn(weight.shape[0], LORA_RANK, dtype=torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": 32, "target_modules": sorted(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _cpu_s(call: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.process_time()
    result = call()
    return time.process_time() - start_s, result


def _one_round(engine: Any, every: int | None, prompts: list[list[int]], seconds: dict[str, list[float]]) -> None:
    """Decode one response in every slot, with an update each `every` steps (None: without)."""
    for number, prompt in enumerate(prompts):
        engine.submit(str(number), prompt)
    is_after, num_steps, num_left, total_s = False, 0, len(prompts), 0.0
    while num_left:
        if every is not None and num_steps and num_steps % every == 0:
            engine.prepare()
            for key, call in (("load", engine.update), ("canary", engine.check)):
                spent_s, _ = _cpu_s(call)
                seconds.setdefault(key, []).append(spent_s)
                total_s, is_after = total_s + spent_s, True
        spent_s, num_ended = _cpu_s(engine.step)
        # the first one computes the prompts
        key = "step_after" if is_after else "prompts" if num_steps == 0 else "step"
        seconds.setdefault(key, []).append(spent_s)
        num_left, is_after, num_steps, total_s = num_left - num_ended, False, num_steps + 1, total_s + spent_s
    seconds.setdefault("round", []).append(total_s)


def measure_speed(name: EngineName, size: str, every: int, rounds: int) -> dict[str, Any]:
    """Measure every way in this process.

    Returns:
        Per way: medians in CPU seconds, and tokens per CPU second of all rounds.
    """
    import numpy as np
    import torch

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    ways: list[Way] = ["none", "recompute", "keep", *(["adapter"] if name == "vllm" else [])]
    with tempfile.TemporaryDirectory(prefix="tba-updates-") as root:
        folders = [Path(root) / str(seed) for seed in (0, 1)]
        for seed, folder in enumerate(folders):
            make_random_model(folder, size, seed)
        engines: dict[Way, Any] = {way: MergedWeights(name, folders, way) for way in ("recompute", "keep")}
        engines["none"] = engines["recompute"]
        if "adapter" in ways:
            engines["adapter"] = Adapters(folders, Path(root))
        times: dict[Way, dict[str, list[float]]] = {way: {} for way in ways}
        for turn in range(rounds + 1):
            prompts = rng.integers(3, SIZES[size][0], (NUM_SLOTS, PROMPT_TOKENS)).tolist()
            for way in ways:
                found: dict[str, list[float]] = {}
                _one_round(engines[way], None if way == "none" else every, prompts, found)
                for key, values in found.items() if turn else ():  # the first round warms up
                    times[way].setdefault(key, []).extend(values)
    num_tokens = rounds * NUM_SLOTS * RESPONSE_TOKENS
    return {
        "engine": name, "size": size, "every": every, "rounds": rounds, "num_slots": NUM_SLOTS,
        "prompt_tokens": PROMPT_TOKENS, "response_tokens": RESPONSE_TOKENS,
        "ways": {
            way: {
                "tokens_per_s": round(num_tokens / sum(found["round"]), 1),
                **{f"{key}_s": round(statistics.median(values), 4) for key, values in found.items()},
            }
            for way, found in times.items()
        },
    }  # fmt: skip


def measure_logprobs(folder: Path, num_responses: int) -> list[dict[str, Any]]:
    """Measure how far kept keys and values move the log-probs of the tokens after an update.

    Args:
        folder: with the versions that benchmarks/weights.py has trained.

    Returns:
        Per learning rate and distance, in nats: means over the tokens after the update of |kept - new version|, of
        |recomputed - new version| and of |old version - new version|, and the largest of the first.
    """
    import numpy as np
    from tba_searcher.engines.engine import EngineSettings, Request
    from tba_searcher.engines.torch.engine import EmbeddedEngine

    from tba.config.searcher import KvAtUpdate
    from tba.versions import START, PolicyVersion
    from tba.wire import Sampling

    sizes: dict[str, Any] = {**ENGINE_SIZES, "num_slots": num_responses, "seed": 1, "dtype": "float32"}
    version, rows = PolicyVersion(1, 1), []
    for path in sorted(folder.glob("*-[1-9]*.safetensors")):
        rate, distance = path.stem.rsplit("-", 1)
        with tempfile.TemporaryDirectory(prefix="tba-updates-") as root:
            old, new = (_as_model(file, Path(root) / file.stem) for file in (folder / f"{rate}-0.safetensors", path))
            of_old, of_new = (EmbeddedEngine(file.parent, START, EngineSettings(**sizes)) for file in (old, new))
            gaps: dict[str, list[Any]] = {"kept": [], "recomputed": [], "stale": []}
            settings: tuple[tuple[str, KvAtUpdate], ...] = (("kept", "keep"), ("recomputed", "recompute"))
            for key, kv_at_update in settings:
                engine = EmbeddedEngine(old.parent, START, EngineSettings(**sizes, kv_at_update=kv_at_update))
                prompts = np.random.default_rng(0).integers(1, VOCAB_SIZE, (num_responses, PROMPT_TOKENS)).tolist()
                for number, prompt in enumerate(prompts):
                    engine.submit(
                        Request(
                            request_id=str(number), prompt_tokens=tuple(prompt), sampling=Sampling(temperature=1.0),
                            max_response_tokens=RESPONSE_TOKENS, eos_ids=(),
                        )
                    )  # fmt: skip
                done = [completion for _ in range(RESPONSE_TOKENS // 2) for completion in engine.step()]
                engine.load_weights([new], version)
                while len(done) < num_responses:
                    done += engine.step()
                for completion in done:
                    start, tokens = completion.version_spans[-1].start, completion.response_tokens.tolist()
                    prompt = prompts[int(completion.request_id)]
                    pure = of_new.canary_logprobs(prompt, tokens)[start:]
                    gaps[key].append(np.abs(completion.sampler_logprobs[start:] - pure))
                    if key == "kept":
                        gaps["stale"].append(np.abs(of_old.canary_logprobs(prompt, tokens)[start:] - pure))
            rows.append(
                {
                    "learning_rate": rate,
                    "steps_apart": int(distance),
                    **{key: float(np.concatenate(values).mean()) for key, values in gaps.items()},
                    "kept_largest": float(np.concatenate(gaps["kept"]).max()),
                }
            )
    return rows


def _as_model(file: Path, folder: Path) -> Path:
    """Make a folder that an engine can load of the tensors of a trained version, in float32; return its tensors."""
    from safetensors.torch import load_file, save_file

    from benchmarks.weights_bench.training import model_config

    config = model_config()
    config.dtype = "float32"
    config.save_pretrained(folder)
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def main() -> None:
    """Print one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("engine", choices=("embedded", "vllm"))
    speed.add_argument("--size", choices=tuple(SIZES), default="0.1B")
    speed.add_argument("--every", type=int, default=16, help="steps between two updates")
    speed.add_argument("--rounds", type=int, default=3)
    logprobs = commands.add_parser("logprobs")
    logprobs.add_argument("--states", type=Path, default=ROOT / "build" / "weights-bench")
    logprobs.add_argument("--responses", type=int, default=32)
    args = parser.parse_args()
    if args.command == "speed":
        print(json.dumps(measure_speed(args.engine, args.size, args.every, args.rounds)))
    else:
        print(json.dumps(measure_logprobs(args.states, args.responses)))


if __name__ == "__main__":
    main()
