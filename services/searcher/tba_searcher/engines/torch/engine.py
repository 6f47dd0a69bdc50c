"""The embedded engine: a transformers model decoded with a static key-value cache.

    submit -> waiting -> (keys and values of the prefix, computed once per prompt) -> slot -> one token per step
                                                                                   -> completion

* Continuous batching: a finished request is replaced before the next step (batch.py).
* The S rollouts of a visit share one prefill: it fills a prefix slot with all prompt tokens but the last, to be copied.
  A request begins to decode with its last prompt token, so that tokens are sampled in one place only.
* A request that continues a conversation takes the keys and values of the turn before, and computes its new tokens.
* New weights: keys and values of active requests are recomputed before the next step; all others are dropped.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from tba.errors import ConfigError, ModelError
from tba.versions import PolicyVersion
from tba.wire import Manifest, Sampling
from tba_searcher.engines.engine import Completion, EngineDiedError, EngineSettings, Request, as_ids, check_request
from tba_searcher.engines.tokenizer import StopStringMatcher, load_tokenizer, response_decoder
from tba_searcher.engines.torch.batch import Batch, ConversationCache, KVCache, PrefixCache, use_grouped_attention
from tba_searcher.engines.torch.exactness import (
    NUM_TOKENS,
    WAY_OUT,
    attention_windows,
    check_gap,
    check_positions,
    tried_length,
)
from tba_searcher.engines.torch.model import StagedParams, load_model
from tba_searcher.engines.weight_check import check_loaded, file_stamps, params_sha256

_PREFILL_TOKENS = 4096
"""Most padded tokens of one prefill."""
_EXTENSION_KEYS = 4 * _PREFILL_TOKENS
"""Most keys of one pass over tokens in the middle."""
_BELOW_ONE = 1.0 - 2.0**-50
"""Largest random number of a draw: its product with the sum of all probabilities stays below that sum."""


class EmbeddedEngine:
    """Implements `tba_searcher.engines.engine.Engine` with a local model folder in Hugging Face format.

    Raises:
        ConfigError: the folder holds no usable causal language model, its context is too short, or the engine does not
            decode it exactly.
        EngineDiedError: the keys and values of so many slots do not fit into memory.
    """

    def __init__(self, folder: Path, version: PolicyVersion, settings: EngineSettings) -> None:
        self._settings, self._folder = settings, folder
        self._device = torch.device(settings.device)
        self._max_len = settings.max_prompt_tokens + settings.max_response_tokens
        dtype, trust = settings.dtype, settings.trust_remote_code
        self._model: Any = load_model(folder, dtype=dtype, device=settings.device, trust_remote_code=trust)
        config = self._model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and self._max_len > limit:
            raise ModelError(
                f"searcher.max_prompt_tokens + searcher.max_response_tokens = {self._max_len}, "
                f"but the model's context is {limit} tokens; lower one of them"
            )
        check_positions(config, self._max_len)
        use_grouped_attention(self._model)
        self.num_slots = settings.num_slots
        self.default_eos_ids = as_ids(getattr(self._model.generation_config, "eos_token_id", None))
        self.vocab_size = int(config.vocab_size)
        self._windows = attention_windows(config, self._max_len)
        num_prefix_slots = max(4, settings.num_slots // 4)
        try:
            self._cache = KVCache(
                num_layers=config.num_hidden_layers,
                num_slots=settings.num_slots + num_prefix_slots,
                num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
                max_len=self._max_len,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
                dtype=self._model.dtype,
                device=self._device,
            )
        except AttributeError as error:
            raise ModelError(f"the embedded engine does not decode {config.model_type}: {error}; {WAY_OUT}") from None
        except RuntimeError as error:
            raise EngineDiedError(_reason(error, settings.num_slots)) from error
        self._prefixes = PrefixCache(settings.num_slots, num_prefix_slots)
        # as many tokens as the slots hold: all conversations may be between two turns at once. Nothing is allocated
        # before a conversation needs it
        self._conversations = ConversationCache(settings.num_slots * self._max_len)
        # code with an attention of its own, as GPT-Neo's, may take queries in the middle for those at the end
        self._can_extend = bool(getattr(self._model, "_supports_attention_backend", False))
        self._batch = Batch(settings.num_slots, self._max_len)
        self._waiting: deque[Request] = deque()
        self._ids: set[str] = set()
        self.version = version
        self._staged: StagedParams | None = None
        self._cache_is_stale = False
        """Whether the keys and values of active requests still belong to the previous weights."""
        self._generator = _generator(self._device, settings.seed)
        self._columns = torch.arange(self._max_len, device=self._device)
        self.num_prefilled_tokens = 0
        self._check_decoding()
        self._generator = _generator(self._device, settings.seed)  # the check has drawn from it
        self.num_prefilled_tokens = 0

    @property
    def num_active(self) -> int:
        """Number of requests that are being decoded now."""
        return self._batch.num_active

    @property
    def num_waiting(self) -> int:
        """Number of submitted requests that have no slot yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request (see `Engine.submit`)."""
        is_known = request.request_id in self._ids
        check_request(request, self._settings, is_known=is_known, vocab_size=self.vocab_size)
        self._ids.add(request.request_id)
        if self._conversations.find(request) is None:
            self._waiting.append(request)
        else:  # before requests that begin, whose keys and values would take the place of its own
            at = next((at for at, each in enumerate(self._waiting) if each.continues is None), self.num_waiting)
            self._waiting.insert(at, request)

    def abort(self, request_id: str) -> None:
        """Forget a request (see `Engine.abort`)."""
        self._ids.discard(request_id)
        for slot in self._batch.active_slots():
            active = self._batch.requests[slot]
            if active is not None and active.request.request_id == request_id:
                self._batch.remove(slot)
        self._waiting = deque(item for item in self._waiting if item.request_id != request_id)

    def step(self) -> list[Completion]:
        """Decode one token for every active request (see `Engine.step`)."""
        try:
            return self._step()
        except EngineDiedError:
            raise
        except (RuntimeError, MemoryError) as error:  # torch has no narrower error for memory and kernels
            raise EngineDiedError(_reason(error, self.num_slots)) from error

    @torch.inference_mode()
    def _step(self) -> list[Completion]:
        if self._cache_is_stale:
            self._compute_again()
            self._cache_is_stale = False
        self._fill_slots()
        moves = self._batch.compact()
        if moves:
            source, target = np.array(moves).T
            self._cache.copy_slots(self._tensor(source), self._tensor(target), int(self._batch.position[target].max()))
        if not self._batch.num_used:
            return []
        tokens, logprobs = self._decode()
        # weights that passed their checks can still overflow on a long response; its tokens would be noise
        if not np.isfinite(logprobs).all():
            raise EngineDiedError(f"the logits are not finite under version {self.version}; its weights are broken")
        completions = []
        for slot, reason in self._batch.append(tokens, logprobs, self._completes_stop):
            completion = self._batch.completion(slot, reason)
            self._keep(slot)
            self._batch.remove(slot)
            self._ids.discard(completion.request_id)
            completions.append(completion)
        return completions

    def stage_weights(self, tensors_paths: Sequence[Path]) -> None:
        """Read weights into memory while the engine generates (see `StagingEngine`)."""
        self._staged = None  # its memory first
        self._staged = StagedParams(self._model, tensors_paths)

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Replace all parameters in flight (see `Engine.load_weights`)."""
        staged = self._staged  # once: another thread may stage meanwhile
        if staged is None or staged.stamps != file_stamps(tensors_paths):
            staged = StagedParams(self._model, tensors_paths)
        elif self._staged is staged:
            self._staged = None
        staged.put_into(self._model)
        self.version = version
        # of requests that begin from here on
        self._prefixes.clear()
        self._conversations.clear()
        # recomputed by the next step, and not here: a second load may follow at once, as when a version is refused
        self._cache_is_stale = True
        for slot in self._batch.active_slots():
            active = self._batch.requests[slot]
            if active is not None:
                active.versions.append((version, self._batch.num_response_tokens(slot)))

    def verify(self, manifest: Manifest) -> None:
        """Check the digest of the parameters and the canary (see `Engine.verify`)."""
        check_loaded(self, manifest)

    def close(self) -> None:
        """Forget all requests (see `Engine.close`); the memory is freed with the object."""
        self._waiting.clear()
        self._ids.clear()
        self._conversations.clear()
        for slot in self._batch.active_slots():
            self._batch.remove(slot)

    def params_sha256(self) -> str:
        """Return the digest of the parameters that the engine holds."""
        return params_sha256(self._model)

    @torch.inference_mode()
    def canary_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] at temperature 1 of a given response."""
        tokens = [*prompt_tokens, *response_tokens]
        return self._logprobs(tokens, range(len(prompt_tokens), len(tokens)))

    def _logprobs(self, tokens: Sequence[int], places: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] of the tokens at positions `places`, by a forward pass over the whole sequence."""
        ids, at = torch.tensor([tokens], device=self._device), torch.tensor(places, device=self._device)
        # without the cache: the canary must not touch the keys and values of active requests
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=at - 1).logits[0]
        else:
            logits = self._model(input_ids=ids, use_cache=False).logits[0, at - 1]
        return torch.log_softmax(logits.float(), dim=-1).gather(1, ids[0, at, None])[:, 0].cpu().numpy()

    @torch.inference_mode()
    def _check_decoding(self) -> None:
        """Decode a short sequence alone, and one beside a long one. Compare log-probs with passes over whole sequences.

        Raises:
            ConfigError: the log-probs differ, or the model fails with this cache.
            EngineDiedError: the device has too little memory.
        """
        length = tried_length(self._model.config.get_text_config(), self._max_len)
        num, rng = min(NUM_TOKENS, (length - 1) // 2), np.random.default_rng(0)
        if not num:
            return
        name, random = type(self._model).__name__, rng.integers(0, self.vocab_size, length).tolist()
        try:
            (first,) = self._decode_probes([random[:1]], num)
            begun = [random[0], *first.response_tokens.tolist()]
            longest = [*begun, *random[len(begun) : length - num]]  # what was decoded early is its beginning
            short, long = self._decode_probes([random[1:2], longest], num)
            early, late = range(1, num + 1), range(len(longest), len(longest) + num)
            whole = [
                self._logprobs([*longest, *long.response_tokens.tolist()], [*early, *late]),
                self._logprobs([random[1], *short.response_tokens.tolist()], early),
            ]
        except EngineDiedError:  # weights that are not finite: their version is refused, with its name
            self.close()
            return
        except Exception as error:  # a model that is made for another cache can raise anything
            if _is_out_of_memory(error):
                raise EngineDiedError(_reason(error, self.num_slots)) from error
            raise ConfigError(
                f"the embedded engine does not decode a {name}: with its key-value cache the model fails "
                f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); {WAY_OUT}"
            ) from None
        finally:
            self._prefixes.clear()
        decoded = np.stack([each.sampler_logprobs for each in (first, long, short)])
        check_gap(decoded, np.concatenate(whole).reshape(3, num), dtype=self._settings.dtype, what=name)

    def _decode_probes(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Completion]:
        """Return the completions of some prompts, decoded together."""
        limits = {"max_response_tokens": num_tokens, "eos_ids": ()}
        for number, prompt in enumerate(prompts):
            request = Request(request_id=str(number), prompt_tokens=tuple(prompt), sampling=Sampling.of(1.0), **limits)
            self._waiting.append(request)
        found = [each for _ in range(num_tokens * len(prompts)) for each in self._step()]
        return sorted(found, key=lambda each: each.request_id)

    def _decode(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Run one forward pass over the newest token of every slot; return sampled tokens and log-probs, [N] each."""
        batch, num_used = self._batch, self._batch.num_used
        positions = self._tensor(batch.position[:num_used].copy())
        length = int(batch.position[:num_used].max()) + 1
        self._cache.plan_decode(positions, length)
        output = self._model(
            input_ids=self._tensor(batch.current_tokens())[:, None],
            position_ids=positions[:, None],
            attention_mask=self._masks(positions[:, None], length),
            past_key_values=self._cache,
            use_cache=True,
        )
        temperatures = self._tensor(batch.temperature[:num_used])
        options = None
        if batch.has_options:  # beyond a temperature
            slots, banned = batch.banned()
            # an id beyond the vocabulary, as of a tokenizer with more ids than the model, cannot be drawn anyway
            is_in_vocab, limited = banned < self.vocab_size, batch.limited()
            top_k = batch.top_k[limited]
            options = SamplingOptions(
                banned_rows=self._tensor(slots[is_in_vocab]),
                banned_tokens=self._tensor(banned[is_in_vocab]),
                limited_rows=self._tensor(limited),
                top_k=self._tensor(np.where(top_k > 0, top_k, self.vocab_size)),
                top_p=self._tensor(batch.top_p[limited]),
                seeded=batch.seeded(),
            )
        tokens, logprobs = sample(output.logits[:, -1], temperatures, self._generator, options)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    @cached_property
    def _stops(self) -> StopStringMatcher:
        # the tokenizer is read for the first request with stop strings
        tokenizer = load_tokenizer(self._folder, trust_remote_code=self._settings.trust_remote_code)
        return StopStringMatcher(response_decoder(tokenizer), self.vocab_size)

    def _completes_stop(self, tokens: NDArray[np.int64], request: Request) -> bool:
        return self._stops.completes(tokens.tolist(), request.sampling.stop)

    def _keep(self, slot: int) -> None:
        """Keep the keys and values of a request that ends, if another may continue it."""
        request = self._batch.request_of(slot)
        if request.may_continue and self._can_extend:
            num = int(self._batch.position[slot])  # all but the newest token's, which are not computed yet
            tokens = tuple(self._batch.tokens[slot, :num].tolist())
            self._conversations.keep(request, tokens, self._cache.read(slot, num))

    def _fill_slots(self) -> None:
        """Put waiting requests into free slots, after a prefill of the prompts that are not cached."""
        while self._waiting and self._batch.num_active < self.num_slots:
            admitted = self._admit(self._waiting, self.num_slots - self._batch.num_active)
            begun, starts = list[tuple[Request, int]](), dict[int, int]()
            for request in admitted:
                seed, is_greedy = request.sampling.seed, request.sampling.temperature == 0
                own = None if seed is None or is_greedy else _generator(self._device, seed)
                slot = self._batch.add(request, self.version, own)
                kept = self._conversations.find(request)
                if kept is None:
                    begun.append((request, slot))
                else:
                    starts[slot] = self._cache.write(slot, kept)
            self._copy_prefixes(begun)
            self._extend(starts)
            self.num_prefilled_tokens += len(admitted)  # the last token of each, which the next pass takes

    def _admit(self, waiting: deque[Request], most: int) -> list[Request]:
        """Remove up to `most` requests from `waiting`, after a prefill of their prompts that are not cached."""
        admitted, new_prefixes = self._prefixes.admit(waiting, most, self._conversations)
        if new_prefixes:
            self._prefill([prefix for prefix, _ in new_prefixes], [slot for _, slot in new_prefixes])
        return admitted

    def _copy_prefixes(self, begun: Sequence[tuple[Request, int]]) -> None:
        """Copy all prompt tokens but the last, with which a request begins to decode, to the slots of requests."""
        if begun:
            source = [self._prefixes.slot_of(request) for request, _ in begun]
            longest = max(len(request.prompt_tokens) for request, _ in begun) - 1
            target = [slot for _, slot in begun]
            self._cache.copy_slots(self._tensor(np.array(source)), self._tensor(np.array(target)), longest)

    def _compute_again(self) -> None:
        """Compute keys and values of active requests under new weights: each prompt once, then the responses so far."""
        batch = self._batch
        active = [(each.request.prompt_tokens, slot) for slot, each in enumerate(batch.requests) if each is not None]
        slots = [slot for _, slot in sorted(active)]  # equal prompts together: the prefix cache may not hold all
        if not self._can_extend:
            slots = sorted((slot for slot in slots if batch.position[slot]), key=lambda slot: batch.position[slot])
            self._prefill([batch.tokens[slot, : batch.position[slot]].tolist() for slot in slots], slots)
            return
        waiting, left = deque(batch.request_of(slot) for slot in slots), iter(slots)
        while waiting:
            admitted = self._admit(waiting, len(waiting))
            self._copy_prefixes([(request, next(left)) for request in admitted])
        self._extend({slot: int(batch.position[slot]) - batch.num_response_tokens(slot) for slot in slots})

    def _extend(self, starts: dict[int, int]) -> None:
        """Compute keys and values of slots from a position each up to the newest token, in passes that pad little."""
        num_new = {slot: int(self._batch.position[slot]) - start for slot, start in starts.items()}
        left = sorted((slot for slot in starts if num_new[slot]), key=num_new.__getitem__)
        while left:
            num = most_rows([num_new[slot] for slot in left], int(self._batch.position[left].max()))
            self._extend_rows(left[:num], np.array([num_new[slot] for slot in left[:num]]))
            left = left[num:]
        self.num_prefilled_tokens += sum(num_new.values())

    def _extend_rows(self, slots: Sequence[int], nums: NDArray[np.int64]) -> None:
        """Compute keys and values of the last `nums` tokens [N] before the newest one of each slot, in one pass."""
        batch, rows = self._batch, np.array(slots)
        # [N, S]; padding computes the last token of its row again
        columns = np.minimum(np.arange(nums.max()), nums[:, None] - 1)
        positions = (batch.position[rows] - nums)[:, None] + columns
        length = int(batch.position[rows].max())
        self._cache.plan_extension(self._tensor(rows), self._tensor(positions), length)
        places = self._tensor(positions)
        self._model.base_model(
            input_ids=self._tensor(batch.tokens[rows[:, None], positions]),
            position_ids=places,
            attention_mask=self._masks(places, length),
            past_key_values=self._cache,
            use_cache=True,
        )

    def _masks(self, positions: Int[Tensor, "N S"], length: int) -> Tensor | dict[str, Tensor]:
        """Return the mask of queries at `positions` over the first `length` places of their slots, by kind of layer."""
        # slots have different lengths: hide the positions beyond each one, which hold anything
        columns, masks = self._columns[:length], {}
        for kind, window in self._windows.items():
            hidden = columns > positions[..., None]
            if window is not None:
                hidden |= columns <= positions[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self._device)
            masks[kind] = mask.masked_fill_(hidden, float("-inf"))[:, None]  # [N, 1, S, L]
        # where all layers see the same, models of every kind take one mask
        return next(iter(masks.values())) if len(set(self._windows.values())) == 1 else masks

    def _prefill(self, sequences: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Compute keys and values of whole sequences, right-padded, a few thousand tokens at a time."""
        start = 0
        while start < len(sequences):
            end, longest = start + 1, len(sequences[start])
            # padding counts: the longest sequence times their number is what a pass computes
            while end < len(sequences):
                wider = max(longest, len(sequences[end]))
                if wider * (end + 1 - start) > _PREFILL_TOKENS:
                    break
                end, longest = end + 1, wider
            ids = np.zeros((end - start, longest), np.int64)
            for line, sequence in zip(ids, sequences[start:end], strict=True):
                line[: len(sequence)] = sequence
            self._cache.plan_prefill(self._tensor(np.array(slots[start:end])))
            positions = self._columns[:longest].expand(end - start, longest)
            # without the output head: a prefill samples nothing
            self._model.base_model(
                input_ids=self._tensor(ids), position_ids=positions, past_key_values=self._cache, use_cache=True
            )
            start = end
        self.num_prefilled_tokens += sum(map(len, sequences))

    def _tensor(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options besides temperature, by row of the logits. A tensor is empty if no row has the option."""

    banned_rows: Int[Tensor, " B"]
    """With `banned_tokens`: pairs (row, token) that may not be drawn: end of sequence below the minimum length."""
    banned_tokens: Int[Tensor, " B"]
    limited_rows: Int[Tensor, " M"]
    """Rows with a top-k or a top-p."""
    top_k: Int[Tensor, " M"]
    """At least 1; the size of the vocabulary, or more, is off."""
    top_p: Float[Tensor, " M"]
    """Above 0; 1 is off."""
    seeded: Sequence[tuple[int, torch.Generator]] = ()
    """Rows that have a random stream of their own."""


def sample(
    logits: Float[Tensor, "N V"],
    temperatures: Float[Tensor, " N"],
    generator: torch.Generator,
    options: SamplingOptions | None = None,
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Draw one token per row, with its log-prob under exactly the distribution that was drawn from.

    Without options nothing is masked, so that the trainer's log_softmax(logits / temperature) is the same number. A
    model that gives PAD some probability may draw it like any other token. With options, three filters apply in this
    order. The first removes banned tokens. The second keeps the `top_k` most probable tokens, and the third the
    smallest set that holds `top_p` of the remaining mass. The kept mass is renormalised.

    Args:
        temperatures: float32; 0 takes the most probable token and reports its log-prob at temperature 1.
        generator: source of randomness, on the device of `logits`.

    Returns:
        tokens int64 [N] and their log-probs float32 [N].
    """
    greedy = temperatures == 0
    # in float32, as the trainer computes its own: bfloat16 logits would differ by more than the policy does
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    if options is not None:
        scaled[options.banned_rows, options.banned_tokens] = -torch.inf
        if len(options.limited_rows):
            rows = options.limited_rows
            scaled[rows] = _limited(scaled[rows], options.top_k, options.top_p)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # a draw by the inverse of the distribution function: one random number per row, where Gumbel noise for a large
    # vocabulary would take longer than the output head; in float64, so that no token is out of reach
    upto = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)  # [N, V]
    random = torch.empty_like(upto[:, :1]).uniform_(0.0, _BELOW_ONE, generator=generator)
    for row, own in () if options is None else options.seeded:
        random[row].uniform_(0.0, _BELOW_ONE, generator=own)
    # right: the first token whose sum is above the number, which is never one with probability 0
    # for logits that are not finite it is beyond the last token, and the log-prob then says so
    drawn = torch.searchsorted(upto, random * upto[:, -1:], right=True)[:, 0].clamp(max=upto.shape[1] - 1)
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def most_rows(lengths: Sequence[int], longest: int) -> int:
    """Return how many of some rows, shortest first, one padded pass takes.

    At most a quarter of it is padding. Every row brings a copy of up to `longest` keys and values.
    """
    num = 1
    while num < len(lengths) and (num + 1) * longest <= _EXTENSION_KEYS:
        if sum(lengths[: num + 1]) < 0.75 * lengths[num] * (num + 1):
            break
        num += 1
    return num


def _limited(logits: Float[Tensor, "M V"], top_k: Int[Tensor, " M"], top_p: Float[Tensor, " M"]) -> Tensor:
    """Return the logits [M, V] with -inf for the tokens that top-k and top-p leave out; ties with the k-th stay."""
    ordered, order = logits.sort(dim=-1, descending=True)
    # the k-th value and not the first k columns: equal logits must have equal chances
    last = ordered.gather(1, (top_k.clamp(max=logits.shape[1]) - 1)[:, None])  # [M, 1]
    ordered = ordered.masked_fill(ordered < last, -torch.inf)
    probs = torch.softmax(ordered, dim=-1)
    # the mass before a token: the one that crosses top_p stays, so that at least one does
    mass_before = probs.cumsum(dim=-1) - probs
    dropped = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))


def _reason(error: Exception, num_slots: int) -> str:
    text = str(error).strip().partition("\n")[0]
    if _is_out_of_memory(error):
        return f"the engine is out of memory with {num_slots} slots; lower searcher.num_slots ({text})"
    return f"the engine failed with {type(error).__name__}: {text}"


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
