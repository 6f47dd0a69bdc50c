"""What vLLM's 8-bit weights, keys and values do to log-probs and to the effective sample size: a report by setting.

    python benchmarks/fp8.py [--device cuda] [--model FOLDER] [--responses 64] [--canaries 24] [--wrong 8] [--settings]

A small llama is trained here (benchmarks/canary_bench/models.py), or --model names a folder in Hugging Face format. For
each setting vLLM samples responses, and the trainer computes the log-probs of the same tokens from the tensors as
published, in bfloat16. The gap of a token is the difference. Candidates of a canary are compared likewise, before an
update in flight and after it, and when the engine holds wrong weights (benchmarks/canary_bench/defects.py): how many of
those the canary refuses. On the CPU FP8 weights need bfloat16 there, and per block AMX; FP8 keys and values
need AVX-512. Weights per channel go through torch's slow product there, 0.1 s for each token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tba_searcher.engines.engine import Completion, Request  # noqa: E402
from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings  # noqa: E402
from tba_searcher.engines.weight_loader import load_model  # noqa: E402
from tba_trainer.checkpoints.canary import EIGHT_BIT_TOLERANCE, MIN_TOLERANCE, candidate  # noqa: E402
from tba_trainer.learner.batch_metrics import ess_ratio  # noqa: E402
from tba_trainer.model.logprobs import LogprobModel  # noqa: E402
from tba_trainer.model.packing import pack_sequences  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from benchmarks.canary_bench.defects import Weights, wrong_weights  # noqa: E402
from benchmarks.canary_bench.models import KINDS, make_model, repository_texts  # noqa: E402
from tba.config.searcher import SearcherVllmSection  # noqa: E402
from tba.versions import START, PolicyVersion  # noqa: E402
from tba.wire import Sampling  # noqa: E402

DTYPE = "bfloat16"
SETTINGS: dict[str, dict[str, Any]] = {
    "as published": {},
    "weights per channel": {"quantization": "fp8_per_channel"},
    "weights per block": {"quantization": "fp8_per_block"},
    "keys and values e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "keys and values e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "weights per channel, keys and values e4m3": {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8_e4m3"},
}
"""Name of a row -> settings of searcher.vllm."""
ROOM: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {"gpu_memory_share": 0.1, "kv_cache_bytes": 2**28}}
"""Settings of searcher.vllm by device: a card has room for an engine of each setting."""
PROMPT_TOKENS = 16
NEXT = PolicyVersion(1, 1)
NEXT_NOISE = 0.01
"""Of the version after the first: Gaussian noise of this share of each tensor's standard deviation."""


def main(argv: list[str] | None = None) -> int:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="instead of a llama that is trained here")
    parser.add_argument("--responses", type=int, default=64, metavar="N", help="that are sampled for each setting (64)")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="of each response (48)")
    parser.add_argument("--canaries", type=int, default=24, metavar="N", help="candidates of a canary (24)")
    parser.add_argument("--wrong", type=int, default=8, metavar="N", help="of them, for each kind of wrong weights (8)")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="ROW")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file, too")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch, "model")
        if args.model is None:
            print("training:", make_model(folder, KINDS["trained llama"]), file=sys.stderr, flush=True)
        parity = Parity(folder, Path(scratch), args)
        rows = {}
        for name in args.settings:
            rows[name] = parity.row(SearcherVllmSection(**SETTINGS[name], **ROOM[args.device]))
            print(name, rows[name], file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps({"load": os.getloadavg(), "rows": rows}, indent=1))
    print(report(rows))
    if args.wrong:
        print(wrong_report(rows))
    return 0


class Parity:
    """Two versions of a model, and what the trainer makes of them."""

    def __init__(self, folder: Path, scratch: Path, args: argparse.Namespace) -> None:
        self._folder, self._args = folder, args
        self._paths = {START: scratch / "start.safetensors", NEXT: scratch / "next.safetensors"}
        generator, right = torch.Generator().manual_seed(0), Weights.of(folder)
        _save(right.tensors, self._paths[START])
        tensors = {
            name: tensor + torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0) * NEXT_NOISE
            for name, tensor in right.tensors.items()
        }
        _save(tensors, self._paths[NEXT])
        self._wrong = dict[str, Path]()
        for defect, wrong in wrong_weights(folder) if args.wrong else ():
            # an engine has the configuration with which it starts
            if wrong.config == right.config and wrong.tensors.keys() == right.tensors.keys():
                self._wrong[defect] = scratch / f"wrong-{len(self._wrong)}.safetensors"
                _save(wrong.tensors, self._wrong[defect])
        model, following = (
            load_model(folder, dtype=DTYPE, device=args.device, trust_remote_code=False) for _ in self._paths
        )
        self._models = {START: LogprobModel(model, temperature=1.0)}
        following.load_state_dict(tensors, strict=False)
        self._models[NEXT] = LogprobModel(following, temperature=1.0)
        tokens = AutoTokenizer.from_pretrained(folder)("\n".join(repository_texts()[:8]), verbose=False)["input_ids"]
        stride = max(1, (len(tokens) - PROMPT_TOKENS) // args.responses)
        self._prompts = [np.array(tokens[i * stride :][:PROMPT_TOKENS], np.int32) for i in range(args.responses)]
        self._candidates = [candidate(seed, model.config.vocab_size) for seed in range(args.canaries)]

    def row(self, section: SearcherVllmSection) -> dict[str, Any]:
        """Measure one setting; a setting that vLLM does not run here has the reason alone."""
        settings = VllmSettings(
            num_slots=32, max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=self._args.tokens, seed=0, dtype=DTYPE,
            device=self._args.device, section=section,
        )  # fmt: skip
        try:
            engine = VllmEngine(self._folder, [self._paths[START]], START, settings)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
        try:
            found: dict[str, Any] = {**self._sampled(engine), "canary": self._canary(engine, START)}
            engine.stage_weights([self._paths[NEXT]])
            start_s = time.perf_counter()
            engine.load_weights([self._paths[NEXT]], NEXT)
            found["pause_ms"] = 1e3 * (time.perf_counter() - start_s)
            found["canary_after_update"] = self._canary(engine, NEXT)
            found["canary_of_wrong"] = {}
            for defect, path in self._wrong.items():
                engine.load_weights([path], START)
                found["canary_of_wrong"][defect] = self._canary(engine, START, self._args.wrong)
        finally:
            engine.close()
        return found

    def _sampled(self, engine: VllmEngine) -> dict[str, float | None]:
        for index, prompt in enumerate(self._prompts):
            engine.submit(
                Request(
                    request_id=str(index), prompt_tokens=tuple(prompt.tolist()), sampling=Sampling(temperature=1.0),
                    max_response_tokens=self._args.tokens, eos_ids=(),
                )
            )  # fmt: skip
        done: list[Completion] = []
        while engine.num_active or engine.num_waiting:
            done += engine.step()
        done.sort(key=lambda completion: int(completion.request_id))
        # the trainer's minus the sampler's: the log of the weight that importance sampling gives a token
        log_ratios = [
            self._logprobs(START, prompt, completion.response_tokens) - completion.sampler_logprobs
            for prompt, completion in zip(self._prompts, done, strict=True)
        ]
        tokens = np.concatenate(log_ratios).astype(np.float64)
        gaps = np.abs(tokens)
        return {
            "tokens": len(tokens),
            "mean_gap": float(gaps.mean()),
            "p99_gap": float(np.quantile(gaps, 0.99)),
            "max_gap": float(gaps.max()),
            "kl_per_token": float(-tokens.mean()),
            "ess_of_tokens": ess_ratio(tokens),
            "ess_of_responses": ess_ratio(np.array([each.sum(dtype=np.float64) for each in log_ratios])),
        }

    def _canary(self, engine: VllmEngine, version: PolicyVersion, num: int | None = None) -> list[float]:
        """Return the largest gap of each of the first `num` candidates (None: of all), sorted."""
        worst = list[float]()
        for tokens in self._candidates[:num]:
            prompt, response = tokens[:8], tokens[8:]
            found = engine.canary_logprobs(prompt.tolist(), response.tolist())
            worst.append(float(np.abs(found - self._logprobs(version, prompt, response)).max()))
        return sorted(worst)

    @torch.no_grad()
    def _logprobs(
        self, version: PolicyVersion, prompt: NDArray[np.int32], response: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        row = pack_sequences([prompt], [response], self._args.device)
        return self._models[version].token_logprobs(row).float().cpu().numpy()


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def report(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table of Markdown, one line for each setting."""
    lines = [
        "| `searcher.vllm` | gap of a token, nats: mean | 99 % | largest | KL per token | ESS of tokens | of responses "
        "| canary: median, largest | after an update | pause, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "refused" in row:
            lines.append(f"| {name} | not here: {row['refused']} | | | | | | | | |")
            continue
        canaries = (f"{np.median(row[key]):.3f}, {max(row[key]):.2f}" for key in ("canary", "canary_after_update"))
        numbers = [
            f"{row['mean_gap']:.4f}",
            f"{row['p99_gap']:.3f}",
            f"{row['max_gap']:.2f}",
            f"{row['kl_per_token']:.5f}",
        ]
        numbers += [
            f"{row['ess_of_tokens']:.4f}",
            f"{row['ess_of_responses']:.3f}",
            *canaries,
            f"{row['pause_ms']:.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def wrong_report(rows: dict[str, dict[str, Any]]) -> str:
    """Return, by kind of wrong weights and row, the median of the largest gaps and the share that is refused."""
    measured = {name: row["canary_of_wrong"] for name, row in rows.items() if "refused" not in row}
    limits = {name: EIGHT_BIT_TOLERANCE if SETTINGS[name] else MIN_TOLERANCE[DTYPE] for name in measured}
    heads = " | ".join(f"{name}: gap | refused at {limit:g}" for name, limit in limits.items())
    lines = [f"| wrong | {heads} |", f"|---|{'---|---|' * len(measured)}"]
    for defect in dict.fromkeys(defect for found in measured.values() for defect in found):
        cells = [
            f"{np.median(found[defect]):.2f} | {np.mean(np.array(found[defect]) > limits[name]):.2f}"
            for name, found in measured.items()
        ]
        lines.append(f"| {defect} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
