"""Context parallelism against one process with the whole sequences: objectives, families, who has which positions."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tba_trainer.learner.forward_backward import Ranks
from tba_trainer.model import context as context_module
from tba_trainer.model import packing
from tba_trainer.model.context import Context, _deal, set_context
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import find_segments, pack_sequences
from tba_trainer.model.policy import prepare
from torch import Tensor

from tba.config.objective import PRESETS
from tba.config.trainer import LoraSection
from tba.errors import ConfigError
from tests.support.context_group import in_context_group
from tests.support.model_families import PACKED, make_family_model
from tests.support.trainer_values import make_batch
from tests.unit.trainer.test_trainer_forward_backward import OWN, Result, assert_same, run, section
from tests.unit.trainer.test_trainer_packing import gradient, plain_varlen_attn, some_tokens

CASES = [*((preset, 2, 4096) for preset in (*PRESETS, OWN)), ("tb", 3, 1), ("m2po", 3, 60), (OWN, 3, 60)]


@pytest.mark.parametrize(("preset", "size", "max_tokens"), CASES)
def test_every_objective_has_the_gradient_of_one_process(model: Any, preset: str, size: int, max_tokens: int) -> None:
    """4096 tokens: one pass for all. 60: groups whole in several. 1: every rollout alone."""
    batch, objective = make_batch(0), section(preset)
    whole = run(model, objective, batch, 4096)

    def work(context: Context) -> Result:
        return run(model, objective, batch, max_tokens, ranks=Ranks(), context=context)

    results = in_context_group(size, work)
    total = torch.stack([result[0] for result in results]).sum(dim=0)
    assert total.norm() > 0
    for result in results:
        assert_same((total, *result[1:]), whole)
    assert all(float((result[0] - total).norm()) > 0.1 * float(total.norm()) for result in results)  # each has a part


def values_and_gradient(model: Any, context: Context | None, *, temperature: float = 0.7) -> tuple[Tensor, Tensor]:
    prompts, responses = some_tokens()
    prompts = [prompts[i % 3 if i % 2 else 0] for i in range(len(prompts))]
    responses[1] = responses[1][:1]  # with a shared prompt it adds no position
    own = copy.deepcopy(model)
    set_context(own, context)
    # as of a conversation: some tokens of a response are not trained, and the first two sequences are one rollout
    trained = [np.arange(len(response))[::-1] % 4 != 1 for response in responses]
    rollouts = [0, *range(len(prompts) - 1)]
    sequences = pack_sequences(prompts, responses, "cpu", trained=trained, rollouts=rollouts)
    values, _ = LogprobModel(own, temperature=temperature).logprobs_and_entropy(sequences)
    return values.detach(), gradient(own, values)


@pytest.mark.parametrize("name", PACKED)
def test_every_packed_family_has_the_gradients_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a window, and in blocks of queries."""
    whole = make_family_model(name)
    expected = values_and_gradient(whole, None)
    monkeypatch.setattr(packing, "WINDOW_BLOCK", 2)
    found = in_context_group(2, lambda context: values_and_gradient(whole, context))
    for values, _ in found:
        torch.testing.assert_close(values, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sum(each for _, each in found), expected[1], atol=1e-4, rtol=1e-5)


def test_a_process_without_a_position_takes_part_in_every_exchange() -> None:
    """A filler, or a canary of one token: one position for two processes."""
    whole, token = make_family_model("llama"), [np.array([3], dtype=np.int32)]
    sequences = pack_sequences(token, token, "cpu")
    expected = gradient(whole, LogprobModel(whole, temperature=1.0).token_logprobs(sequences))

    def work(context: Context) -> Tensor:
        own = copy.deepcopy(whole)
        set_context(own, context)
        return gradient(own, LogprobModel(own, temperature=1.0).token_logprobs(sequences))

    first, second = in_context_group(2, work)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    assert float(second.abs().max()) == 0


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]])
def test_an_adapter_has_the_values_and_gradients_of_one_process(targets: list[str], recomputes: bool) -> None:
    """Also one without which keys and values of the first layer have no gradient."""
    pytest.importorskip("peft", reason="LoRA needs the extra tba-trainer[lora]")
    whole = prepare(make_family_model("llama"), LoraSection(rank=4, target_modules=targets), recomputes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if ".lora_B." in name:  # 0 at first, and with it the gradient of A
                parameter.normal_(std=0.1, generator=generator)
    expected = values_and_gradient(whole, None)
    found = in_context_group(2, lambda context: values_and_gradient(whole, context))
    for values, _ in found:
        torch.testing.assert_close(values, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sum(each for _, each in found), expected[1], atol=1e-4, rtol=1e-5)


def test_variable_length_attention_gets_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel replaced by a plain one, both ways attend as one process does."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen_attn)
    packed, generator = pack_sequences(*some_tokens(), "cpu"), torch.Generator().manual_seed(0)
    places = torch.arange(packed.input_ids.shape[1])[None]
    rows = [torch.randn(places.shape[1], 2, 8, generator=generator) for _ in range(3)]
    segments = find_segments(packed.lengths, "cpu", positions=packed.positions)
    whole = segments.attend(torch.nn.Module(), rows, None, None)

    def work(context: Context) -> tuple[Tensor, Tensor]:
        part = context.part_of(replace(packed, input_ids=places))  # whose ids say which places it has
        num, here = sum(num for num, _ in part.segments.sizes), part.input_ids[0]
        out = part.segments.attend(torch.nn.Module(), [row[here] for row in rows], None, None)
        return here[:num], out[:num]

    for flash in (False, True):
        monkeypatch.setattr(context_module, "has_flash", lambda query, flash=flash: flash)
        found = in_context_group(2, work)
        here, out = (torch.cat(each) for each in zip(*found, strict=True))
        torch.testing.assert_close(out, whole[here])


SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=12)


@given(sizes=SIZES, num_ranks=st.integers(2, 5), share=st.booleans())
def test_every_position_is_once_and_sees_all_before(sizes: list[tuple[int, int]], num_ranks: int, share: bool) -> None:
    prompts = [np.arange(1, 1 + (sizes[0][0] if share else p), dtype=np.int32) for p, _ in sizes]
    sequences = pack_sequences(prompts, [np.ones(r, np.int32) for _, r in sizes], "cpu")
    dealt = _deal(np.array(sequences.lengths), sequences.positions, num_ranks)
    num_places = sequences.input_ids.shape[1]
    assert sorted(np.concatenate([places for places, _, _ in dealt]).tolist()) == list(range(num_places))
    nums = [len(places) for places, _, _ in dealt]
    assert max(nums) - min(nums) <= 1
    columns = sequences.position_ids[0].numpy()
    for places, pieces, first_keys in dealt:
        split = np.split(places, pieces[:, 0].cumsum()[:-1]) if len(pieces) else []
        for piece, (num, num_seen), first in zip(split, pieces, first_keys, strict=True):
            assert len(piece) == num
            # neighbours in their sequence, of which they see all up to the last of them
            assert piece.tolist() == sequences.positions[first + num_seen - num : first + num_seen].tolist()
            assert columns[piece].tolist() == list(range(num_seen - num, num_seen))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_have_the_same_number_of_positions_and_pairs(num_ranks: int) -> None:
    dealt = [places for places, _, _ in _deal(np.array([512]), np.arange(512), num_ranks)]
    assert {len(places) for places in dealt} == {512 // num_ranks}
    assert {int((places + 1).sum()) for places in dealt} == {512 * 513 // 2 // num_ranks}


def test_models_whose_passes_cannot_be_shared_are_refused() -> None:
    def refusal(name: str, **rope: Any) -> str:
        whole = make_family_model(name)
        for module in whole.modules():
            if rope and hasattr(module, "rope_type"):
                module.rope_type = rope["rope_type"]
                module.config.rope_parameters["original_max_position_embeddings"] = 64

        def work(context: Context) -> str:
            own = copy.deepcopy(whole)
            set_context(own, context)
            with pytest.raises(ConfigError) as caught:
                LogprobModel(own, temperature=1.0)
            return str(caught.value)

        (found,) = set(in_context_group(2, work))
        return found

    start = "trainer.sharding.context is 2: "
    assert refusal("olmo2").startswith(f"{start}models of type 'olmo2' run over padded rows")
    for rope_type in ("dynamic", "longrope"):
        expected = f"{start}rotary embeddings of type '{rope_type}' depend on"
        assert refusal("llama", rope_type=rope_type).startswith(expected)
