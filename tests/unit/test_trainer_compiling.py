"""torch.compile of decoder layers: the same values for any sizes, and no second compilation."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tba_trainer.model import policy
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import compile_layers
from torch._dynamo.testing import CompileCounterWithBackend

from tba.errors import ConfigError
from tests.support.model_families import VOCAB_SIZE, make_family_model


def values_and_gradient(policy: LogprobModel, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(num_sequences)
    lengths = rng.integers(1, 9, (num_sequences, 2))
    prompts, responses = (
        [rng.integers(2, VOCAB_SIZE, n).astype(np.int32) for n in column] for column in lengths.T.tolist()
    )
    policy.model.zero_grad()
    values = policy.token_logprobs(pack_sequences(prompts, responses, "cpu"))
    values.sum().backward()
    return values.detach(), torch.cat([p.grad.flatten() for p in policy.model.parameters()])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_layers_compute_the_same_for_batches_of_any_size() -> None:
    """The backend is dynamo and autograd without code generation: CI machines need no C++ compiler."""
    model = make_family_model("llama")
    policy, plain = (LogprobModel(m, temperature=1.0) for m in (model, copy.deepcopy(model)))
    backend = CompileCounterWithBackend("aot_eager")
    compile_layers(model, backend=backend)  # type: ignore[arg-type]
    counts = []
    for num_sequences in (3, 5, 9):
        torch.testing.assert_close(
            values_and_gradient(policy, num_sequences), values_and_gradient(plain, num_sequences), atol=1e-5, rtol=1e-5
        )
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] == counts[2] > 0
    assert copy.deepcopy(model).model.layers[0]._compiled_call_impl is None  # the reference is not compiled


def test_what_cannot_be_compiled_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Linear has no decoder layers"):
        compile_layers(torch.nn.Linear(2, 2))
    monkeypatch.setattr(policy, "is_sharded", lambda model: True)
    with pytest.raises(ConfigError, match=r"for one process: .*set it to false or trainer.num_processes to 1"):
        compile_layers(make_family_model("llama"))
