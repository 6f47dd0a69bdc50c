"""The chunked output head: values, gradients, dtypes, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tba_trainer.model.logprobs import head_logprobs

TRAINER = Path(__file__).parents[2] / "services" / "trainer"


def random_head(*, dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[torch.Tensor, ...]:
    """Hidden states [7, 5], weight [11, 5], bias [11], targets [7]."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, 11, (7,), generator=generator)
    return random(7, 5), random(11, 5), random(11) if bias else None, targets  # type: ignore[return-value]


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) / 0.7
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk_bytes", [None, 3 * 11 * 8, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_formula(chunk_bytes: int | None, bias: bool) -> None:
    """One chunk of all 7 positions; chunks of 3; a bound too small for one position, which then goes alone."""
    hidden, weight, b, targets = random_head(bias=bias)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        h, w = inputs[:2]
        return head_logprobs(h, w, inputs[2] if bias else None, targets, temperature=0.7, chunk_bytes=chunk_bytes)

    inputs = (hidden, weight, b) if bias else (hidden, weight)
    torch.testing.assert_close(ours(*inputs), plain(hidden, weight, b, targets), atol=1e-12, rtol=1e-12)
    # a second backward pass computes the logits again: equal up to rounding
    assert torch.autograd.gradcheck(ours, inputs, nondet_tol=1e-10)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, bias, targets = random_head()
    head_logprobs(hidden, weight.detach(), bias.detach(), targets, temperature=1.0).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not head_logprobs(hidden, weight, bias, targets, temperature=1.0).requires_grad


def test_logits_too_large_to_exponentiate_are_no_problem() -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    values = head_logprobs(hidden, weight, None, torch.tensor([0, 0]), temperature=1.0)
    assert values.tolist() == [0.0, -2e4]
    values.sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("chunk_bytes", [None, 3 * 11 * 4])
def test_bfloat16_products_answer_in_float32(chunk_bytes: int | None) -> None:
    """Autocast over float32 weights, and bfloat16 weights: both near the exact values, gradients in the dtype of W."""
    exact = plain(*random_head())
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, bias, targets = random_head(dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = head_logprobs(hidden, weight, bias, targets, temperature=0.7, chunk_bytes=chunk_bytes)
        assert values.dtype == torch.float32
        assert 0 < (values.double() - exact).abs().max() < 0.1
        values.sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
        wide_hidden, wide_weight, wide_bias, _ = random_head()
        plain(wide_hidden, wide_weight, wide_bias, targets).sum().backward()
        assert wide_weight.grad is not None
        assert (
            torch.nn.functional.cosine_similarity(weight.grad.double().flatten(), wide_weight.grad.flatten(), dim=0)
            > 0.999
        )


MEASURE = """
import json, re, sys, torch
from tba_trainer.model.logprobs import head_logprobs
torch.set_num_threads(1)
hidden = torch.randn(1024, 16, requires_grad=True)
weight = torch.randn(50_000, 16).requires_grad_()
targets = torch.randint(0, 50_000, (1024,))
def peak():  # ru_maxrss would begin with the peak of the process that started this one
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
head_logprobs(hidden[:8], weight, None, targets[:8], temperature=1.0).sum().backward()
before = peak()
if sys.argv[1] == "chunked":
    head_logprobs(hidden, weight, None, targets, temperature=1.0, chunk_bytes=16 * 1024**2).sum().backward()
else:
    (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
print(json.dumps(peak() - before))
"""


def test_peak_memory_is_bounded_by_the_chunk_not_by_the_batch() -> None:
    """All logits are 205 MB in float32, and the plain way needs them more than once; chunks here are 16 MiB."""

    def extra_bytes(way: str) -> int:
        environment = {**os.environ, "PYTHONPATH": str(TRAINER), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", MEASURE, way]
        return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120).stdout)

    assert extra_bytes("chunked") < 64 * 1024**2
    assert extra_bytes("plain") > 400 * 1024**2
