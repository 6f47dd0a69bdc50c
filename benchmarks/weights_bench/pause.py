"""How long an engine generates nothing while it takes new weights, against the bare copy of the same bytes.

    python -m benchmarks.weights_bench.pause vllm --size 0.5B --rounds 5     prints one JSON document

Two random models in bfloat16 take turns in one engine, one thread of torch. The bare copy goes from memory into memory
that was written before. `cold` is a load that nothing was staged for: files to parameters, digests included. `staged`
is the load of weights that were prepared beside generation; `stage_s` is what preparing them takes, and holds nothing
up. The checks follow in both cases: the digest of what the engine holds, then the canary, one forward pass of 7 tokens.
Keys and values of requests under way are recomputed by the next step, and are not in here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from tests.support.tiny_model import make_tiny_tokenizer

SIZES = MappingProxyType(
    {
        "0.5B": (151936, 896, 24, 4864, 14),  # as Qwen2.5-0.5B: 494 million parameters
        "0.1B": (32000, 640, 14, 2560, 10),
        "tiny": (256, 128, 2, 256, 4),
    }
)
"""Tokens of the vocabulary, hidden size, layers, size of the MLP, attention heads (with two of keys and values)."""
PROMPT, RESPONSE = (4, 5, 6), (7, 8, 9, 10)
TIMEOUT_S = 1800.0
EngineName = Literal["embedded", "vllm"]


def measure_pause(engine: EngineName, *, size: str = "0.5B", rounds: int = 5) -> dict[str, Any]:
    """Measure in a process of its own: vLLM changes the process that it is in.

    Returns:
        Medians over rounds: seconds of the bare copy, of `stage`, and of load, digest and canary, cold and staged; the
        ratios of load and digest to the bare copy; and whether every digest was that of the files.
    """
    command = [sys.executable, "-m", __name__, engine, "--size", size, "--rounds", str(rounds)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def make_random_model(folder: Path, size: str, seed: int) -> Path:
    """Make a model in bfloat16 with a tokenizer; return its tensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    vocab_size, hidden_size, num_layers, intermediate_size, num_heads = SIZES[size]
    config = AutoConfig.for_model(
        "qwen2", vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=num_layers,
        intermediate_size=intermediate_size, num_attention_heads=num_heads, num_key_value_heads=2,
        tie_word_embeddings=True, max_position_embeddings=512, eos_token_id=2,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({name: param.detach() for name, param in model.named_parameters()}, path, {"format": "pt"})
    return path


def _make_engine(name: EngineName, folder: Path, path: Path) -> Any:
    from tba.versions import START

    sizes: dict[str, Any] = {"num_slots": 4, "max_prompt_tokens": 48, "max_response_tokens": 40, "seed": 1}
    if name == "embedded":
        from tba_searcher.engines.engine import EngineSettings
        from tba_searcher.engines.torch.engine import EmbeddedEngine

        return EmbeddedEngine(folder, START, EngineSettings(**sizes, dtype="bfloat16"))
    from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings

    return VllmEngine(folder, [path], START, VllmSettings(**sizes, dtype="bfloat16"))


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.perf_counter()
    result = call()
    return time.perf_counter() - start_s, result


def measure_here(name: EngineName, size: str, rounds: int) -> dict[str, Any]:
    """Measure in this process (see `measure_pause`)."""
    import torch
    from safetensors.torch import load_file

    from tba.versions import PolicyVersion
    from tba.weights import params_sha256_of_files

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tba-pause-") as root:
        folders = [Path(root) / str(seed) for seed in (0, 1)]
        paths = [make_random_model(folder, size, seed) for seed, folder in enumerate(folders)]
        digests = [params_sha256_of_files([path]) for path in paths]
        engine = _make_engine(name, folders[0], paths[0])
        source = {key: tensor.clone() for key, tensor in load_file(paths[0]).items()}
        target = {key: tensor.clone() for key, tensor in source.items()}
        seconds: dict[str, list[float]] = {}
        exact = True

        def note(key: str, value: float) -> None:
            seconds.setdefault(key, []).append(value)

        for turn in range(2 * rounds):
            which, kind = (turn + 1) % 2, ("cold", "staged")[turn % 2]
            os.utime(paths[which])  # what was staged, or is left of the last round, is not taken for these files
            note("bare_copy_s", _timed(lambda: [target[key].copy_(source[key]) for key in source])[0])
            if kind == "staged":
                note("stage_s", _timed(lambda which=which: engine.stage_weights([paths[which]]))[0])
            version = PolicyVersion(1, turn + 1)
            note(f"{kind}_load_s", _timed(lambda w=which, v=version: engine.load_weights([paths[w]], v))[0])
            digest_s, found = _timed(engine.params_sha256)
            note(f"{kind}_digest_s", digest_s)
            note(f"{kind}_canary_s", _timed(lambda: engine.canary_logprobs(PROMPT, RESPONSE))[0])
            exact = exact and found == digests[which]
        engine.close()
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        ratios = {
            f"{kind}_ratio": round(
                (medians[f"{kind}_load_s"] + medians[f"{kind}_digest_s"]) / medians["bare_copy_s"], 3
            )
            for kind in ("cold", "staged")
        }
        num_bytes = sum(path.stat().st_size for path in paths) // 2
        rounded = {key: round(value, 4) for key, value in medians.items()}
        return {"engine": name, "size": size, "bytes": num_bytes, "rounds": rounds, **rounded, **ratios, "exact": exact}


def main() -> None:
    """Print the measurement of one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("embedded", "vllm"))
    parser.add_argument("--size", choices=tuple(SIZES), default="0.5B")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(measure_here(args.engine, args.size, args.rounds)))


if __name__ == "__main__":
    main()
