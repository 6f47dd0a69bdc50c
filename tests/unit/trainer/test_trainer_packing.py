"""Packed passes against the model called on one sequence at a time: per family, values and gradients. With experts,
whose products run in the compute dtype, nothing but the objective is trained."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tba_trainer.model import logprobs, packing
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import (
    BUCKET_MIN_SHARE,
    PACKED_ATTENTION,
    PACKED_FAMILIES,
    find_segments,
    pack_sequences,
    rollout_sums,
)
from tba_trainer.model.policy import compile_layers, prepare
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from tba.errors import ConfigError, TbaError
from tests.support.model_families import PACKED, PADDED, VOCAB_SIZE, make_family_model

LENGTHS = [(3, 7), (9, 1), (1, 14), (4, 2), (6, 5), (2, 12), (8, 20)]


def some_tokens(seed: int = 0, *, vocab_size: int = VOCAB_SIZE) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab_size, p).astype(np.int32) for p, _ in LENGTHS]
    responses = [rng.integers(0, vocab_size, r).astype(np.int32) for _, r in LENGTHS]
    responses[-1][:2] = 0, 1  # the ids of padding and end of sequence are tokens like any other
    return prompts, responses


def alone(model: Any, prompt: np.ndarray, response: np.ndarray, temperature: float) -> torch.Tensor:
    """Log-probs of one response, with nothing but the model's own forward pass. [R]"""
    ids = torch.tensor(np.concatenate([prompt, response]))[None, :].long()
    table = (model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0] / temperature).log_softmax(-1)
    return table[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None].long())[:, 0]


def gradient(model: Any, values: torch.Tensor) -> torch.Tensor:
    """The gradient of a weighted sum of the values, every one with a weight of its own."""
    model.zero_grad()
    (values * torch.linspace(-1.0, 1.0, len(values), device=values.device)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_values_and_gradients_are_those_of_every_sequence_alone(name: str, share: bool) -> None:
    model = make_family_model(name)
    own = copy.deepcopy(model)
    prompts, responses = some_tokens()
    if share:  # groups of one prompt, next to each other and apart
        prompts = [prompts[i % 3 if i % 2 else 0] for i in range(len(prompts))]
    policy = LogprobModel(model, temperature=0.7)
    assert policy.is_packed == (name in PACKED)
    found = policy.token_logprobs(pack_sequences(prompts, responses, "cpu"))
    expected = torch.cat([alone(own, p, r, 0.7) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient(model, found), gradient(own, expected), atol=1e-4, rtol=1e-5)


def test_a_mask_begins_where_a_card_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's memory-efficient kernel takes any, and fails in its backward pass where the address is no multiple of 16
    from transformers.integrations import sdpa_attention

    masks, attend = list[torch.Tensor](), sdpa_attention.sdpa_attention_forward

    def note(module: Any, query: Any, key: Any, value: Any, mask: torch.Tensor, **settings: Any) -> Any:
        masks.append(mask)
        return attend(module, query, key, value, mask, **settings)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", note)
    monkeypatch.setattr(packing, "WINDOW_BLOCK", 8)
    module: Any = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False)
    for num_queries, num_keys, window in itertools.product((1, 7, 20, 41), (41, 43), (3, 13, 100)):
        shapes = [(1, 2, num, 4) for num in (num_queries, num_keys, num_keys)]
        query, key, value = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
        packing.attend_in_window(module, (query, key, value), None, window)
    assert len(masks) > 50
    assert {mask.data_ptr() % 16 for mask in masks if mask is not None} == {0}
    assert {mask.stride(-2) % 8 for mask in masks if mask is not None} == {0}


@pytest.mark.parametrize("window", [1, 3, 8, 13, 100])
def test_queries_see_the_newest_keys_within_their_window(window: int) -> None:
    module: Any = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False)
    for num_queries, num_keys in ((1, 9), (7, 20), (23, 23), (20, 41)):
        query, key, value = (torch.randn(1, 2, num, 4) for num in (num_queries, num_keys, num_keys))
        found = packing.attend_in_window(module, (query, key, value), None, window)
        at = torch.arange(num_keys)
        distance = at[num_keys - num_queries :, None] - at
        hidden = (distance < 0) | (distance >= window)
        scores = (query @ key.transpose(2, 3) / 2).masked_fill(hidden, -torch.inf)
        torch.testing.assert_close(found, (scores.softmax(-1) @ value).transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_code_that_came_with_a_model_is_not_trusted_to_pack() -> None:
    model = make_family_model("llama")
    model.__class__ = type("Remote", (type(model),), {"__module__": "transformers_modules.somebody.llama"})
    assert not LogprobModel(model, temperature=1.0).is_packed


def test_every_family_that_is_packed_is_tested() -> None:
    assert {name.partition(" ")[0] for name in PACKED} == PACKED_FAMILIES


@pytest.mark.parametrize("name", ["gpt2", "qwen2 with a window", "olmo2"])
def test_a_sequence_sees_nothing_of_its_neighbours(name: str) -> None:
    """One sequence is exchanged for another of the same length: everything else keeps its bits."""
    model = make_family_model(name)
    policy = LogprobModel(model, temperature=1.0)
    prompts, responses = some_tokens()
    others = some_tokens(seed=1)
    before = policy.token_logprobs(pack_sequences(prompts, responses, "cpu"))
    changed = 2
    prompts[changed], responses[changed] = others[0][changed], others[1][changed]
    sequences = pack_sequences(prompts, responses, "cpu")
    after = policy.token_logprobs(sequences)
    kept = sequences.row != changed
    assert torch.equal(before[kept], after[kept])
    assert not torch.isclose(before[~kept], after[~kept]).any()


def test_a_sharded_model_makes_one_padded_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass of it is a collective, so all ranks must make the same number."""
    model = make_family_model("olmo2")
    calls = []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    prompts, responses = some_tokens()
    values = []
    for sharded in (True, False):
        monkeypatch.setattr(logprobs, "is_sharded", lambda model, sharded=sharded: sharded)
        policy = LogprobModel(model, temperature=1.0)
        calls.clear()
        values.append(policy.token_logprobs(pack_sequences(prompts, responses, "cpu")))
        assert (len(calls) == 1) == sharded
    torch.testing.assert_close(*values, atol=1e-5, rtol=1e-5)


def test_sequences_are_laid_out_one_after_another() -> None:
    prompts = [np.array([5, 6, 7], dtype=np.int32), np.array([8], dtype=np.int32)]
    responses = [np.array([10, 11], dtype=np.int32), np.array([12, 13, 1], dtype=np.int32)]
    packed = pack_sequences(prompts, responses, "cpu")
    assert packed.input_ids.tolist() == [[5, 6, 7, 10, 8, 12, 13]]  # the last response token predicts nothing
    assert (packed.position_ids.tolist(), packed.predictors.tolist()) == ([[0, 1, 2, 3, 0, 1, 2]], [2, 3, 4, 5, 6])
    assert packed.trained_tokens.tolist() == [10, 11, 12, 13, 1]  # the end-of-sequence token stays in
    assert packed.row.tolist() == [0, 0, 1, 1, 1]
    assert rollout_sums(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), packed).tolist() == [3.0, 28.0]


def test_a_prompt_that_comes_again_is_there_once() -> None:
    prompts = [np.array(tokens, dtype=np.int32) for tokens in ([5, 6, 7], [5, 6], [5, 6, 7], [5, 6, 7])]
    responses = [np.array(tokens, dtype=np.int32) for tokens in ([10, 11], [12, 1], [13, 14, 15], [1])]
    packed = pack_sequences(prompts, responses, "cpu")
    assert packed.input_ids.tolist() == [[5, 6, 7, 10, 5, 6, 12, 13, 14]]
    assert (packed.position_ids.tolist(), packed.lengths) == ([[0, 1, 2, 3, 0, 1, 2, 3, 4]], (4, 3, 5, 3))
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 7, 8, 0, 1, 2]
    assert packed.predictors.tolist() == [2, 3, 5, 6, 2, 7, 8, 2]
    segments = find_segments(packed.lengths, "cpu", positions=packed.positions)
    assert torch.equal(segments.positions[segments.firsts], torch.arange(9))
    assert torch.equal(segments.sources[segments.places], segments.positions)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 50, 333])
def test_a_sum_has_the_same_bits_in_every_company(num_tokens: int) -> None:
    rng = torch.Generator().manual_seed(num_tokens)
    values = -10 * torch.rand(num_tokens, generator=rng)
    prompt, response = np.array([3], dtype=np.int32), np.full(num_tokens, 5, dtype=np.int32)
    alone = rollout_sums(values, pack_sequences([prompt], [response], "cpu"))
    torch.testing.assert_close(alone, values.double().sum()[None].float())
    for width in (1, 8, 51, 64, 400, 1025):
        other = np.full(width, 5, dtype=np.int32)
        together = pack_sequences([prompt] * 2, [other, response], "cpu")
        found = rollout_sums(torch.cat([torch.rand(width, generator=rng), values]), together)
        assert found[1].item() == alone.item(), width


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), one_bucket=st.booleans())
def test_buckets_hold_every_position_once_and_little_padding(lengths: list[int], one_bucket: bool) -> None:
    segments = find_segments(lengths, "cpu", one_bucket=one_bucket)
    places, sources = segments.places, segments.sources
    num_places = sum(rows * width for rows, width in segments.buckets)
    assert len(sources) == num_places
    assert torch.equal(sources[places], torch.arange(sum(lengths)))
    assert len(places.unique()) == sum(lengths)
    assert num_places <= (max(lengths) * len(lengths) if one_bucket else sum(lengths) / BUCKET_MIN_SHARE)
    assert segments.offsets.tolist() == [0, *np.cumsum(lengths)]
    # a row of a bucket holds positions of one sequence, in order from its first
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    start = 0
    for rows, width in segments.buckets:
        table = sequence[sources[start : start + rows * width]].view(rows, width)
        assert (table == table[:, :1]).all()
        start += rows * width


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_attention_refuses_to_be_used_for_anything_else(name: str) -> None:
    model = make_family_model(name)
    LogprobModel(model, temperature=1.0)
    assert model.config._attn_implementation == PACKED_ATTENTION
    with pytest.raises(TbaError, match=r"it is for passes over one packed row; call model.set_attn_implementation"):
        model(input_ids=torch.full((2, 3), 5), attention_mask=torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(TbaError, match="for passes over one packed row"):
        model.generate(torch.full((1, 3), 5), attention_mask=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    model.set_attn_implementation("sdpa")
    assert model(input_ids=torch.full((2, 3), 5)).logits.shape == (2, 3, VOCAB_SIZE)


def test_the_exchange_of_attention_does_not_reach_the_saved_config(tmp_path: Any) -> None:
    model = make_family_model("llama")
    LogprobModel(model, temperature=1.0)
    model.save_pretrained(tmp_path)
    assert PACKED_ATTENTION not in (tmp_path / "config.json").read_text()


def plain_varlen_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: Any, key_offsets: Any, *_: Any, **__: Any
) -> torch.Tensor:
    """Causal attention of sequences one after another, whose queries are the last ones, as torch's kernel for CUDA."""
    outs = []
    for (a, b), (c, d) in zip(
        itertools.pairwise(offsets.tolist()), itertools.pairwise(key_offsets.tolist()), strict=True
    ):
        sees = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        parts = [t.transpose(0, 1) for t in (query[a:b], key[c:d], value[c:d])]
        outs.append(torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=sees).transpose(0, 1))
    return torch.cat(outs)


def test_variable_length_attention_gets_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel replaced by a plain one, both ways attend alike, also where sequences share their prompt."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen_attn)
    prompts, responses = some_tokens()
    packed = pack_sequences([prompts[i % 3] for i in range(len(prompts))], responses, "cpu")
    segments = find_segments(packed.lengths, "cpu", positions=packed.positions)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(packed.input_ids.shape[1], 2, 8, generator=generator) for _ in range(3)]
    in_buckets = segments.attend(torch.nn.Module(), rows, None, None)
    monkeypatch.setattr(packing, "has_flash", lambda query: True)
    torch.testing.assert_close(segments.attend(torch.nn.Module(), rows, None, None), in_buckets)


def values_and_gradient(policy: LogprobModel, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(num_sequences)
    lengths = rng.integers(1, 9, (num_sequences, 2))
    prompts, responses = ([rng.integers(2, VOCAB_SIZE, n).astype(np.int32) for n in column] for column in lengths.T)
    policy.model.zero_grad()
    values = policy.token_logprobs(pack_sequences(prompts, responses, "cpu"))
    values.sum().backward()
    return values.detach(), torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def test_under_autocast_a_cpu_attends_in_float32() -> None:
    query, key, value = (torch.randn(1, heads, 6, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    seen: list[torch.dtype] = []

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in str(func):
                seen.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Kernels():
        out, _ = packing.packed_attention(SimpleNamespace(num_key_value_groups=2), query, key, value, None)
    assert seen
    assert set(seen) == {torch.float32}
    assert out.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_layers_compute_the_same_for_batches_of_any_size() -> None:
    """The backend is dynamo and autograd without code generation: CI machines need no C++ compiler."""
    model = make_family_model("llama")
    policy, plain = (LogprobModel(m, temperature=1.0) for m in (model, copy.deepcopy(model)))
    backend = CompileCounterWithBackend("aot_eager")
    compile_layers(model, backend=backend)  # type: ignore[arg-type]
    LogprobModel(make_family_model("llama"), temperature=1.0)  # the trainer makes copies before the first pass compiles
    assert getattr(AttentionInterface()[PACKED_ATTENTION], "_torchdynamo_disable", False)
    counts = []
    for num_sequences in (3, 5, 9):
        found, expected = (values_and_gradient(each, num_sequences) for each in (policy, plain))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] == counts[2] > 0
    assert copy.deepcopy(model).model.layers[0]._compiled_call_impl is None  # the reference is not compiled


def test_what_cannot_be_compiled_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="Linear has no decoder layers"):
        compile_layers(torch.nn.Linear(2, 2))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """The dtypes of each product with experts, from now on."""
    grouped_mm, seen = torch.nn.functional.grouped_mm, list[tuple[torch.dtype, torch.dtype]]()

    def note(left: torch.Tensor, right: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append((left.dtype, right.dtype))
        return grouped_mm(left, right, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", note)
    return seen


def test_autocast_reaches_the_experts(products: list[tuple[torch.dtype, torch.dtype]]) -> None:
    model, plain = (make_family_model("qwen3_moe") for _ in range(2))
    sequences = pack_sequences(*some_tokens(), "cpu")
    exact = gradient(plain, LogprobModel(plain, temperature=0.7).token_logprobs(sequences))
    assert set(products) == {(torch.float32, torch.float32)}
    products.clear()
    policy = LogprobModel(copy.deepcopy(model), temperature=0.7, autocast_dtype=torch.bfloat16)
    found = gradient(policy.model, policy.token_logprobs(sequences))
    assert (set(products), found.dtype) == ({(torch.bfloat16, torch.bfloat16)}, torch.float32)
    assert 0.98 < torch.nn.functional.cosine_similarity(found, exact, dim=0) < 1
    logits = model(input_ids=sequences.input_ids).logits  # the mode of experts is one of the model, not of all
    assert torch.equal(logits, make_family_model("qwen3_moe")(input_ids=sequences.input_ids).logits)


def test_no_loss_of_the_router_is_trained() -> None:
    """Also where config.json asks for its logits, with which transformers adds a loss beside its own."""
    model, plain = (make_family_model("qwen3_moe") for _ in range(2))
    model.config.output_router_logits = True
    sequences = pack_sequences(*some_tokens(), "cpu")
    gradients = [gradient(m, LogprobModel(m, temperature=0.7).token_logprobs(sequences)) for m in (model, plain)]
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, None])
def test_layers_with_experts_are_compiled_and_computed_again(autocast_dtype: Any, products: list[Any]) -> None:
    """Their products are those of layers that are not compiled: a layer that is computed again has the same."""
    model = make_family_model("qwen3_moe")
    plain = copy.deepcopy(model)
    policy = LogprobModel(prepare(model, None, True), temperature=1.0, autocast_dtype=autocast_dtype)
    backend = CompileCounterWithBackend("eager")
    compile_layers(model, backend=backend)  # type: ignore[arg-type]
    products.clear()  # of the check of `prepare`
    sequences = pack_sequences(*some_tokens(), "cpu")
    found = gradient(model, policy.token_logprobs(sequences))
    assert backend.frame_count > 0
    # two products of the one layer that has experts, twice
    assert [left for left, _ in products] == [autocast_dtype or torch.float32] * 4
    expected = LogprobModel(plain, temperature=1.0, autocast_dtype=autocast_dtype).token_logprobs(sequences)
    torch.testing.assert_close(found, gradient(plain, expected), atol=1e-5, rtol=1e-5)
