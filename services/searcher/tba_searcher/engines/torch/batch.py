"""The batch of the embedded engine: requests in slots, their keys and values, and cached prompt prefixes.

A slot here is a row of the engine: an index into the host arrays of `Batch` and into the key-value tensor of `KVCache`.

    slots 0 .. num_slots - 1     one active request each; the first `num_used` of them are decoded together
    slots num_slots ..           keys and values of prompt prefixes, managed by `PrefixCache` and copied into the others
    beside the slots             keys and values of conversations between two turns, in `ConversationCache`

`Batch` keeps numpy arrays, so that a decode step costs no Python per slot. A finished request leaves a hole. New
requests take holes first, and `Batch.compact` closes the others, so that no step computes an empty slot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tba.versions import PolicyVersion
from tba_searcher.engines.engine import Completion, Request, VersionMarks, make_completion

Prefix = tuple[int, ...]
"""All prompt tokens but the last one."""


@dataclass(slots=True)
class ActiveRequest:
    """The state of a slot that does not change with each token."""

    request: Request
    started_at_s: float
    generator: Any = None
    """Random stream of a request that has a seed of its own."""
    versions: VersionMarks = field(default_factory=list)


class Batch:
    """Tokens, positions, log-probs and limits of every slot.

    `position[i]` is the index in `tokens[i]` of the newest token, whose keys and values are not computed yet.
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots = num_slots
        self.num_used = 0
        """Number of slots in use, including the holes that finished requests have left."""
        self.holes: list[int] = []
        self.requests: list[ActiveRequest | None] = [None] * num_slots
        self.tokens = np.zeros((num_slots, max_len), np.int64)
        self.logprobs = np.zeros((num_slots, max_len), np.float32)
        self.position = np.zeros(num_slots, np.int64)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        """0 is off, as for greedy requests."""
        self.top_p = np.ones(num_slots, np.float32)
        """1 is off, as for greedy requests."""
        self._prompt_len = np.zeros(num_slots, np.int64)
        self._first_end = np.zeros(num_slots, np.int64)
        """The first position where a response may end before its length limit."""
        self._last_position = np.zeros(num_slots, np.int64)
        self._has_stops = np.zeros(num_slots, np.bool_)
        self._has_options = np.zeros(num_slots, np.bool_)
        self._eos = np.full((num_slots, 1), -1, np.int64)
        self._index = np.arange(num_slots)

    @property
    def num_active(self) -> int:
        """Number of slots that hold a request."""
        return self.num_used - len(self.holes)

    def active_slots(self) -> list[int]:
        """Return the slots that hold a request."""
        return [slot for slot in range(self.num_used) if self.requests[slot] is not None]

    def request_of(self, slot: int) -> Request:
        """Return the request in a slot that holds one."""
        active = self.requests[slot]
        assert active is not None
        return active.request

    def add(self, request: Request, version: PolicyVersion, generator: Any = None) -> int:
        """Put a request into a slot, and return the slot.

        Args:
            generator: the random stream of a request with a seed.
        """
        if self.holes:  # first, so that fewer slots have to be moved by `compact`
            slot = self.holes.pop()
        else:
            slot = self.num_used
            self.num_used += 1
        self.requests[slot] = ActiveRequest(request, time.time(), generator, [(version, 0)])
        num_prompt_tokens, eos = len(request.prompt_tokens), request.eos_ids
        self.tokens[slot, :num_prompt_tokens] = request.prompt_tokens
        self.position[slot] = num_prompt_tokens - 1
        sampling = request.sampling
        is_sampled = sampling.temperature > 0
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k if is_sampled else 0
        self.top_p[slot] = sampling.top_p if is_sampled else 1.0
        self._has_stops[slot] = bool(sampling.stop)
        self._has_options[slot] = bool(
            request.min_response_tokens or self.top_k[slot] or self.top_p[slot] < 1 or generator
        )
        self._prompt_len[slot] = num_prompt_tokens
        self._first_end[slot] = num_prompt_tokens + request.min_response_tokens
        self._last_position[slot] = num_prompt_tokens - 1 + request.max_response_tokens
        if len(eos) > self._eos.shape[1]:
            self._eos = np.pad(self._eos, ((0, 0), (0, len(eos) - self._eos.shape[1])), constant_values=-1)
        self._eos[slot] = -1  # no token: an earlier request may have had more ids
        self._eos[slot, : len(eos)] = eos
        return slot

    def remove(self, slot: int) -> None:
        """Forget the request in a slot; the slot is a hole until `add` or `compact`."""
        self.requests[slot] = None
        self.holes.append(slot)

    def compact(self) -> list[tuple[int, int]]:
        """Move requests from the last slots into all holes.

        Returns:
            (from, to) slot of each moved request; the caller must copy its keys and values.
        """
        holes, moves = set(self.holes), []
        flags = (self._has_stops, self._has_options)
        limits = (self._prompt_len, self._first_end, self._last_position, self._eos)
        settings = (self.temperature, self.top_k, self.top_p)
        arrays: tuple[NDArray, ...] = (self.tokens, self.logprobs, self.position, *settings, *limits, *flags)
        for target in sorted(holes):
            while self.num_used and self.num_used - 1 in holes:
                self.num_used -= 1
            if target >= self.num_used:
                break
            source = self.num_used - 1
            self.num_used -= 1
            for array in arrays:
                array[target] = array[source]
            self.requests[target], self.requests[source] = self.requests[source], None
            holes.discard(target)
            moves.append((source, target))
        self.holes.clear()
        return moves

    def current_tokens(self) -> NDArray[np.int64]:
        """Return the newest token of each slot, int64 [N]."""
        return self.tokens[self._index[: self.num_used], self.position[: self.num_used]]

    @property
    def has_options(self) -> bool:
        """Whether any request is sampled with more than a temperature."""
        return bool(self._has_options[: self.num_used].any())

    def banned(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the end-of-sequence ids that may not be sampled yet, as slots [B] and token ids [B]."""
        slots, columns = np.nonzero(
            (self.position[: self.num_used] + 1 < self._first_end[: self.num_used])[:, None]
            & (self._eos[: self.num_used] >= 0)
        )
        return slots, self._eos[slots, columns]

    def limited(self) -> NDArray[np.int64]:
        """Return the slots with a top-k or a top-p."""
        return np.flatnonzero((self.top_k[: self.num_used] > 0) | (self.top_p[: self.num_used] < 1))

    def seeded(self) -> list[tuple[int, Any]]:
        """Return (slot, random stream) of each request with a seed of its own."""
        found = [(slot, a.generator) for slot, a in enumerate(self.requests[: self.num_used]) if a is not None]
        return [(slot, generator) for slot, generator in found if generator is not None]

    def append(
        self,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        completes_stop: Callable[[NDArray[np.int64], Request], bool] | None = None,
    ) -> list[tuple[int, str]]:
        """Add one sampled token to every slot. There must be no holes (`compact`).

        Args:
            completes_stop: returns whether the response so far ends with a stop string of its request.

        Returns:
            (slot, finish reason) of the requests that finished.
        """
        num = self.num_used
        index, position = self._index[:num], self.position[:num]
        position += 1  # a view: this changes self.position
        self.tokens[index, position] = tokens
        self.logprobs[index, position] = logprobs
        stopped = (tokens[:, None] == self._eos[:num]).any(axis=1)
        by_string = np.zeros(num, np.bool_)
        # stop strings need text, hence Python per slot: only for slots that have some and may end here
        for slot in np.flatnonzero(self._has_stops[:num] & ~stopped & (position >= self._first_end[:num])).tolist():
            assert completes_stop is not None
            response = self.tokens[slot, self._prompt_len[slot] : position[slot] + 1]
            by_string[slot] = completes_stop(response, self.request_of(slot))
        finished = np.flatnonzero(stopped | by_string | (position >= self._last_position[:num]))
        return [
            (slot, "stop" if stopped[slot] else "stop_string" if by_string[slot] else "length")
            for slot in finished.tolist()
        ]

    def num_response_tokens(self, slot: int) -> int:
        """Return the number of response tokens sampled so far."""
        return int(self.position[slot] + 1 - self._prompt_len[slot])

    def completion(self, slot: int, reason: str) -> Completion:
        """Return the completion of a finished request."""
        active = self.requests[slot]
        assert active is not None
        response = slice(int(self._prompt_len[slot]), int(self.position[slot]) + 1)
        return make_completion(
            active.request,
            self.tokens[slot, response].astype(np.int32),
            self.logprobs[slot, response].copy(),
            reason,
            marks=active.versions,
            started_at_s=active.started_at_s,
        )


class PrefixCache:
    """Maps prompt prefixes to the slots with their keys and values; evicts the least recently used prefix first.

    Args:
        first_slot, num_slots: the slots of the key-value tensor that hold prefixes.
    """

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self._first_slot, self._num_slots = first_slot, num_slots
        self._slots: dict[Prefix, int] = {}

    def clear(self) -> None:
        """Forget all prefixes: their keys and values belong to old weights."""
        self._slots.clear()

    def slot_of(self, request: Request) -> int:
        """Return the slot with the request's prefix; any slot for a prompt of one token, which has no prefix."""
        return self._slots.get(request.prompt_tokens[:-1], self._first_slot)

    def admit(
        self, waiting: deque[Request], num_free: int, conversations: ConversationCache
    ) -> tuple[list[Request], list[tuple[Sequence[int], int]]]:
        """Remove the first requests from `waiting` whose prefixes fit into the cache together.

        Args:
            conversations: holds the keys and values with which other requests begin.

        Returns:
            The removed requests, at most `num_free`; and (prefix, slot) pairs to prefill before they begin. Pairs of
            requests that still wait may be among them, so that prefills are few and full.
        """
        needed: dict[Prefix, None] = {}
        admitted: list[Request] = []
        while waiting and len(admitted) < num_free:
            prefix = waiting[0].prompt_tokens[:-1] if conversations.find(waiting[0]) is None else ()
            # in the order of arrival: a request whose prefix does not fit ends this round
            if prefix and prefix not in needed and len(needed) == self._num_slots:
                break
            if prefix:
                needed[prefix] = None
            admitted.append(waiting.popleft())
        if all(prefix in self._slots for prefix in needed):
            self._touch(needed)
            return admitted, []
        # a prefill is due: compute prompts further back in the queue with it, so that prefills are few and full
        for request in waiting:
            if len(needed) == self._num_slots:
                break
            if len(request.prompt_tokens) > 1 and conversations.find(request) is None:
                needed[request.prompt_tokens[:-1]] = None
        missing = [prefix for prefix in needed if prefix not in self._slots]
        self._touch(needed)
        free = sorted(set(range(self._first_slot, self._first_slot + self._num_slots)) - set(self._slots.values()))
        while len(free) < len(missing):
            oldest = next(prefix for prefix in self._slots if prefix not in needed)
            free.append(self._slots.pop(oldest))
        for prefix, slot in zip(missing, free, strict=False):
            self._slots[prefix] = slot
        return admitted, [(prefix, self._slots[prefix]) for prefix in missing]

    def _touch(self, prefixes: dict[Prefix, None]) -> None:
        for prefix in prefixes:
            if prefix in self._slots:
                self._slots[prefix] = self._slots.pop(prefix)  # to the end: dicts keep the order of insertion


class ConversationCache:
    """Keys and values of finished requests that others may continue, each as long as its tokens. The oldest go first.

    Args:
        max_tokens: most tokens of all requests together.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._kept: dict[str, tuple[Prefix, Tensor]] = {}

    def clear(self) -> None:
        """Forget all: their keys and values belong to old weights."""
        self._kept.clear()
        self._num_tokens = 0

    def keep(self, request: Request, tokens: Prefix, kv: Tensor) -> None:
        """Add the keys and values of `tokens`, in place of those that the request has continued."""
        for request_id in (request.continues, request.request_id):  # an id may come again
            self._forget(request_id)
        self._kept[request.request_id] = tokens, kv
        self._num_tokens += len(tokens)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._kept)))

    def find(self, request: Request) -> Tensor | None:
        """Return the keys and values of a part of the prompt, of all but its last token at most."""
        if request.continues not in self._kept:
            return None
        tokens, kv = self._kept[request.continues]
        # the tokens decide: a history may have been written anew, and an id may have come again
        is_begun = len(tokens) < len(request.prompt_tokens) and request.prompt_tokens[: len(tokens)] == tokens
        return kv if is_begun else None

    def _forget(self, request_id: str | None) -> None:
        if request_id in self._kept:
            self._num_tokens -= len(self._kept.pop(request_id)[0])


class KVCache(Cache):
    """A static key-value cache with one length per slot, as a transformers `Cache`, so that model code need not change.

    A position beyond the length of a slot may hold anything finite. The attention mask excludes it, and the slot
    overwrites it before it is attended to.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        num_slots: slots of the batch plus slots of prefixes.
        max_len: positions per slot.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_slots, num_kv_heads, max_len, head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=device)
        self._plan = _WritePlan()
        super().__init__(layers=[_KVLayer(layer, self._plan) for layer in self._kv])

    def plan_prefill(self, slots: Tensor) -> None:
        """Have the next forward pass write keys and values to slots (int64 [N]) from position 0 on."""
        self._plan.slots, self._plan.flat_positions, self._plan.positions = slots, None, None

    def plan_extension(self, slots: Tensor, positions: Tensor, length: int) -> None:
        """Have the next forward pass write several tokens to slots (int64 [N]), at `positions` (int64 [N, S]).

        Its queries attend to the first `length` positions of their slots.
        """
        self._plan.slots, self._plan.positions, self._plan.length = slots, positions, length

    def plan_decode(self, positions: Tensor, length: int) -> None:
        """Have the next forward pass write one token at `positions` (int64 [N], all below `length`) to slots 0..N-1."""
        num_heads, max_len = self._kv.shape[3], self._kv.shape[4]
        lines = torch.arange(len(positions) * num_heads, device=positions.device).view(-1, num_heads)
        self._plan.flat_positions, self._plan.length = (lines * max_len + positions[:, None]).flatten(), length
        self._plan.positions = None

    def copy_slots(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy positions [0, length) of slots `source` to slots `target` (int64 [N] each, no slot in both)."""
        if length:
            self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]

    def read(self, slot: int, length: int) -> Tensor:
        """Return a copy of positions [0, length) of a slot."""
        return self._kv[:, :, slot, :, :length].clone()

    def write(self, slot: int, kv: Tensor) -> int:
        """Write what `read` has returned to the first positions of a slot; return their number."""
        self._kv[:, :, slot, :, : kv.shape[-2]] = kv
        return kv.shape[-2]


class _WritePlan:
    """Where the next forward pass writes; `KVCache` sets it, its layers read it."""

    slots: Tensor
    """The slots that a prefill or an extension fills."""
    positions: Tensor | None = None
    """The new positions of each slot, [N, S]; None but for an extension."""
    flat_positions: Tensor | None = None
    """The new position of each slot and head in the flat tensor of a layer, [N * heads]; None during a prefill."""
    length: int = 0


class _KVLayer(CacheLayerMixin):
    """One layer's view of the shared tensor."""

    is_sliding = False

    def __init__(self, kv: Tensor, plan: _WritePlan) -> None:
        super().__init__()
        self.keys, self.values = kv[0], kv[1]
        self.is_initialized = True
        self._plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the tensor exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [N, heads, Q, dim]; return the keys and values that the queries attend to."""
        plan, length = self._plan, key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        if plan.positions is not None:
            # [N, S, heads, dim], as an index of slots and positions around the heads takes it
            place = (plan.slots[:, None], slice(None), plan.positions)
            self.keys[place], self.values[place] = key_states.transpose(1, 2), value_states.transpose(1, 2)
            return self.keys[plan.slots, :, : plan.length], self.values[plan.slots, :, : plan.length]
        if plan.flat_positions is None:
            # prefill: sequences start at position 0 and attend to nothing but themselves
            self.keys[plan.slots, :, :length] = key_states
            self.values[plan.slots, :, :length] = value_states
            return key_states, value_states
        # decode: slots 0..N-1, one new position each
        num_slots, _, _, head_dim = key_states.shape
        self.keys.view(-1, head_dim).index_copy_(0, plan.flat_positions, key_states.reshape(-1, head_dim))
        self.values.view(-1, head_dim).index_copy_(0, plan.flat_positions, value_states.reshape(-1, head_dim))
        return self.keys[:num_slots, :, : plan.length], self.values[:num_slots, :, : plan.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number and the offset of the keys in the mask of a prefill; decoding passes a mask of its own."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always given, never inferred."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of positions per slot."""
        assert self.keys is not None
        return self.keys.shape[2]


ATTENTION_NAME = "tba_grouped"
_PLAIN_KEYWORDS = frozenset({"position_ids", "use_cache", "cache_position", "is_causal", "sliding_window"})
"""Keywords of a model's call that change nothing where a mask is given."""


def use_grouped_attention(model: Any) -> None:
    """Make a CPU model use `grouped_attention`, if its code lets attention functions be exchanged; else do nothing."""
    is_plain = getattr(model, "_supports_attention_backend", False) and model.config._attn_implementation == "sdpa"
    if is_plain and model.device.type == "cpu":
        model.set_attn_implementation(ATTENTION_NAME)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one new token of each of N requests as [N, 1, H, D], and None for the attention weights.

    The query is [N, H, 1, D], keys and values are [N, G, L, D]. This is for grouped-query attention (G < H) with a
    float mask; other calls are passed on to transformers' own function.
    """
    is_unusual = any(kwargs[name] is not None for name in kwargs.keys() - _PLAIN_KEYWORDS)
    is_grouped = query.shape[1] > key.shape[1]
    # heads without groups stay with torch's kernel, which is as fast
    if (
        query.shape[2] != 1
        or not is_grouped
        or attention_mask is None
        or attention_mask.dtype == torch.bool
        or is_unusual
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    num_slots, num_heads, _, head_dim = query.shape
    num_groups, length = key.shape[1], key.shape[2]
    scale = head_dim**-0.5 if scaling is None else scaling
    # For torch's kernel, transformers copies the keys and values of a group once per query head. Here the query heads
    # of a group are the rows of one batched product, and nothing is copied.
    grouped = (query * scale).reshape(num_slots * num_groups, num_heads // num_groups, head_dim)  # [N * G, H / G, D]
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2)).view(num_slots, num_heads, 1, length)
    probs = torch.softmax(scores + attention_mask, dim=-1)
    mixed = torch.bmm(probs.view(num_slots * num_groups, -1, length), value.flatten(0, 1))  # [N * G, H / G, D]
    return mixed.view(num_slots, 1, num_heads, head_dim), None


AttentionInterface.register(ATTENTION_NAME, grouped_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
