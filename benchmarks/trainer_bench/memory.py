"""Peak memory of log-probs, forward and backward, at a vocabulary of 150,000, in a process of its own (Linux, CPU)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

VOCAB_SIZE = 150_000
HIDDEN_SIZE = 64
ROOT = Path(__file__).parents[2]


def measured(way: str, num_tokens: int) -> dict[str, float]:
    """Bytes above model and gradients, and what the logits of all positions would take, of `ours` or `plain`."""
    command = [sys.executable, "-m", "benchmarks.trainer_bench.memory", way, str(num_tokens)]
    path = ":".join(str(folder) for folder in (ROOT, ROOT / "services" / "trainer"))
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, cwd=ROOT)
    return json.loads(done.stdout)


def _status(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes. `ru_maxrss` would begin with the peak of the parent."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _main(way: str, num_tokens: int) -> dict[str, float]:
    import numpy as np
    import torch
    from tba_trainer.model.logprobs import LogprobModel
    from tba_trainer.model.packing import pack_sequences
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config: Any = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    rng = np.random.default_rng(0)

    def logprobs(total: int) -> torch.Tensor:
        """Compute the log-probs of responses of 256 tokens to prompts of one."""
        lengths = [min(256, total - start) for start in range(0, total, 256)]
        responses = [rng.integers(0, VOCAB_SIZE, n).astype(np.int32) for n in lengths]
        sequences = pack_sequences([np.ones(1, np.int32)] * len(lengths), responses, "cpu")
        if way == "ours":
            return policy.token_logprobs(sequences)
        logits = model(input_ids=sequences.input_ids, use_cache=False).logits[0]
        return logits.log_softmax(-1).gather(1, sequences.response_tokens[:, None])[:, 0]

    if way == "ours":
        policy = LogprobModel(model, temperature=1.0)
    logprobs(16).sum().backward()  # gradients exist, and what a first pass allocates for good
    before = _status("VmRSS")
    logprobs(num_tokens).sum().backward()
    return {
        "num_tokens": num_tokens,
        "vocab_size": VOCAB_SIZE,
        "peak_bytes_above_model": _status("VmHWM") - before,
        "head_gradient_bytes": 4 * VOCAB_SIZE * HIDDEN_SIZE,
        "all_logits_bytes": 4 * num_tokens * VOCAB_SIZE,
    }


if __name__ == "__main__":
    print(json.dumps(_main(sys.argv[1], int(sys.argv[2]))))
