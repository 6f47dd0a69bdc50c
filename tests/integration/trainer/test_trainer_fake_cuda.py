"""Whole steps in bfloat16 on tensors that say they are on CUDA: what the host waits for, dtypes, kernels (traced)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tba.config.objective import PRESETS
from tests.support.fake_cuda import environ
from tests.support.trainer_values import make_recipe

pytestmark = pytest.mark.nightly
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {**HEADS, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 512}
LLAMA: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False, **SIZES}
EXPERTS = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
PADDED = {**LLAMA, "model_type": "gemma"}
"""A family that is not packed."""
PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    # published in 16 bits: fake tensors have no grouped product in float32, in which the canary of a version would run
    "experts": {"config": EXPERTS, "model": {"dtype": "bfloat16"}},
    "padded": {"config": PADDED, "trainer": {"gradient_checkpointing": True}},
    "sharded": {"trainer": {"num_processes": 4, "gradient_checkpointing": True}},
    "shared sequences": {"trainer": {"num_processes": 4, "sharding": {"context": 2}, "gradient_checkpointing": True}},
    "sharded adapter": {"trainer": {"num_processes": 2}, "model": {"lora": {"rank": 4}}},
}
STEP_WAITS = ("forward_backward.py: values = torch.cat(vectors).cpu()", "learner.py: norm = float(full(")
"""Once in a step each: the metrics of all micro-batches, and the norm of the gradient."""
PASS_WAITS = ("forward_backward.py: on_cpu = torch.cat(columns)", "reference.py: values[at] = found")
"""Once in a pass each: of theta, of another policy."""
PADDED_WAIT = "packing.py: nums_taken = torch.searchsorted"
"""Once more in each pass of a family that is not packed, before the model."""


def case_of(folder: Path, *, config: dict[str, Any] = LLAMA, passes: bool = True, **sections: Any) -> dict[str, Any]:
    """A case of two micro-batches, of groups that fit into one."""
    given = sections.pop("trainer", {})
    trainer = {"device": "cuda", "compute_dtype": "bfloat16", "micro_batch_tokens": 256, **given}
    num_groups = 2 * trainer.get("num_processes", 1)
    sampling = {"group_size": 4, "rollouts_per_visit": 4, "prompts_per_batch": num_groups}
    searcher = {"max_prompt_tokens": 16, "max_response_tokens": 48}
    recipe = make_recipe(folder, trainer=trainer, sampling=sampling, searcher=searcher, **sections)
    return {"recipe": recipe.model_dump(mode="json"), "model": config, "passes": passes}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    folder = tmp_path_factory.mktemp("fake-cuda")
    cases = {name: case_of(folder, **plan) for name, plan in PLANS.items()}
    cases |= {preset: case_of(folder, objective={"preset": preset}, passes=False) for preset in PRESETS}
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.support.fake_cuda", str(file)]
    done = subprocess.run(command, env=environ(folder), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [*PLANS, *PRESETS])
def test_the_host_waits_for_a_gpu_once_in_a_pass(traces: dict[str, Any], name: str) -> None:
    trace = traces[name]
    assert "error" not in trace, trace["error"]
    seen = trace["step"]
    waits = {line: num for line, num in seen["waits"].items() if not line.startswith(PADDED_WAIT)}
    assert all(line.startswith((*STEP_WAITS, *PASS_WAITS)) for line in waits), waits
    assert all(num == 1 for line, num in waits.items() if line.startswith(STEP_WAITS)), waits
    # two micro-batches; first passes of m2po and the old policy of tba_prime_published double that; raft trains less
    assert all(num in (1, 2, 4) for line, num in waits.items() if line.startswith(PASS_WAITS)), waits
    assert (seen["blocking_copies"], seen["on_cpu"]) == ({}, {})
    assert all("return host.copy_(source)" in line for line in trace["snapshot"]["waits"]), trace["snapshot"]


@pytest.mark.parametrize("name", PLANS)
def test_a_step_runs_in_bfloat16_on_kernels_that_cuda_has(traces: dict[str, Any], name: str) -> None:
    seen = traces[name]["step"]
    if name == "padded":  # torch chooses among the kernels of scaled-dot-product attention with a device alone
        assert {product for product in seen["products"] if "bfloat16" not in product} <= {"bmm float32"}
    else:
        assert all("bfloat16" in product for product in seen["products"]), seen["products"]
        assert set(seen["attention"]) == {"_varlen_attn bfloat16", "_varlen_attn_backward bfloat16"}
    assert 0 < seen["float64_elements"] < 512  # sums and token counts, never activations [P, H]
    assert {op for op in seen["ops"] if op in ATEN and not ATEN[op]} == set()


def _aten() -> dict[str, bool]:
    """Return whether each op of torch has a kernel for CUDA, by torch's own list."""
    spec = find_spec("torchgen")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    text = (Path(spec.submodule_search_locations[0]) / "packaged/ATen/native/native_functions.yaml").read_text()
    found = {}
    for entry in re.split(r"\n(?=- func: )", text):
        if (match := re.match(r"- func: ([\w.]+)\(", entry)) is not None:
            kernels = entry.partition("dispatch:")[2]  # none: it consists of others
            found[f"aten::{match[1]}"] = (
                not kernels or "structured_delegate" in entry or bool(re.search("CUDA|Composite", kernels))
            )
    return found


ATEN = _aten()
