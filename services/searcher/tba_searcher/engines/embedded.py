"""The embedded engine: a transformers model decoded with a static key-value cache and slot refill.

    submit -> waiting -> (prompt keys/values computed once per prompt) -> slot -> one token per step -> completion

* Continuous batching: a finished row is replaced before the next step, holes without a successor are closed.
* The S rollouts of a visit share one prefill: keys and values of all prompt tokens but the last are kept in a prompt
  row and copied. A row enters decoding with its last prompt token, so there is one place where tokens are sampled.
* New weights: keys and values of active rows are computed anew before the next step, prompt rows are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tba.errors import ConfigError
from tba.versions import PolicyVersion
from tba.wire import Manifest
from tba_searcher.engines.base import Completion, EngineDiedError, Request, check_request
from tba_searcher.engines.loading import load_model
from tba_searcher.engines.params import params_sha256, replace_params
from tba_searcher.engines.prompt_rows import PromptRows
from tba_searcher.engines.sampling import Options, sample
from tba_searcher.engines.slot_attention import use_slot_attention
from tba_searcher.engines.slots import SlotTable
from tba_searcher.engines.static_kv import SlotCache
from tba_searcher.engines.stopping import Decode, StopWatch
from tba_searcher.pulling import check_loaded
from tba_searcher.text import load_tokenizer, response_decoder

_PREFILL_TOKENS = 4096
"""Most padded tokens of one prefill pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """What the engine needs besides the model folder."""

    num_slots: int
    max_prompt_tokens: int
    max_response_tokens: int
    seed: int
    """Of the engine's own random stream: never the same twice (see `tba_searcher.seeds`)."""
    dtype: str = "float32"
    device: str = "cpu"
    trust_remote_code: bool = False


class EmbeddedEngine:
    """Implements `tba_searcher.engines.base.Engine` with a local model folder in Hugging Face format.

    The folder's tokenizer is read when the first request with stop strings comes.

    Raises:
        ConfigError: the folder holds no usable causal language model, or its context is too short.
        EngineDiedError: there is no room for the keys and values of so many slots.
    """

    def __init__(self, folder: Path, version: PolicyVersion, settings: EmbeddedSettings) -> None:
        self._settings, self._folder = settings, folder
        self._device = torch.device(settings.device)
        self._max_len = settings.max_prompt_tokens + settings.max_response_tokens
        self._model = _load_model(folder, settings, self._max_len)
        use_slot_attention(self._model)
        config = self._model.config
        self._vocab_size = int(config.get_text_config().vocab_size)
        num_heads = config.num_attention_heads
        num_prompt_rows = max(4, settings.num_slots // 8)
        try:
            self._cache = SlotCache(
                num_layers=config.num_hidden_layers,
                num_rows=settings.num_slots + num_prompt_rows,
                num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
                max_len=self._max_len,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
                dtype=self._model.dtype,
                device=self._device,
            )
        except RuntimeError as error:
            raise EngineDiedError(_sentence(error, settings.num_slots)) from error
        self._prompts = PromptRows(settings.num_slots, num_prompt_rows)
        self._slots = SlotTable(settings.num_slots, self._max_len)
        self._waiting: deque[Request] = deque()
        self._ids: set[str] = set()
        self._version = version
        self._stale = False
        self._generator = _generator(self._device, settings.seed)
        self._stops = StopWatch(lambda ids: self._decode_texts(ids), self._vocab_size)
        self._columns = torch.arange(self._max_len, device=self._device)

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights in use."""
        return self._version

    @property
    def num_slots(self) -> int:
        """Completions decoded at once."""
        return self._settings.num_slots

    @property
    def num_active(self) -> int:
        """Completions being decoded now."""
        return self._slots.num_active

    @property
    def num_waiting(self) -> int:
        """Submitted requests that have no slot yet."""
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Requests that could be submitted now and decoded in the next step."""
        return max(0, self.num_slots - self.num_active - self.num_waiting)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._vocab_size

    @property
    def default_eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the model's generation config; may be empty."""
        ids = getattr(self._model.generation_config, "eos_token_id", None)
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def submit(self, request: Request) -> None:
        """Queue a request (see `Engine.submit`)."""
        check_request(request, self._settings, is_known=request.request_id in self._ids)
        self._ids.add(request.request_id)
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request (see `Engine.abort`)."""
        if request_id not in self._ids:
            return
        self._ids.discard(request_id)
        for index in self._slots.active():
            row = self._slots.rows[index]
            if row is not None and row.request.request_id == request_id:
                self._slots.remove(index)
                return
        self._waiting = deque(item for item in self._waiting if item.request_id != request_id)

    def step(self) -> list[Completion]:
        """Refill, decode one token for every active row, return what finished (see `Engine.step`)."""
        try:
            return self._step()
        except EngineDiedError:
            raise
        except (RuntimeError, MemoryError) as error:
            raise EngineDiedError(_sentence(error, self.num_slots)) from error

    @torch.inference_mode()
    def _step(self) -> list[Completion]:
        if self._stale:
            self._recompute()
        self._refill()
        moves = self._slots.tail_moves()
        if moves:
            source, target = np.array(moves).T
            self._cache.copy_rows(self._tensor(source), self._tensor(target), int(self._slots.position[target].max()))
        num_rows = self._slots.num_rows
        if not num_rows:
            return []
        tokens, logprobs = self._decode()
        if not np.isfinite(logprobs).all():
            raise EngineDiedError(f"the logits are not finite under version {self._version}; its weights are broken")
        completions = []
        for index, reason in self._slots.append(tokens, logprobs, self._completes_stop):
            completion = self._slots.completion(index, reason)
            self._slots.remove(index)
            self._ids.discard(completion.request_id)
            completions.append(completion)
        return completions

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Replace all parameters in flight (see `Engine.load_weights`)."""
        replace_params(self._model, tensors_paths)
        self._version, self._stale = version, True
        for index in self._slots.active():
            row = self._slots.rows[index]
            if row is not None:
                row.begin_span(version, self._slots.num_response_tokens(index))

    def verify(self, manifest: Manifest) -> None:
        """Check what is loaded (see `Engine.verify`)."""
        check_loaded(self, manifest)

    def close(self) -> None:
        """Forget all requests (see `Engine.close`); memory goes with the object."""
        self._waiting.clear()
        self._ids.clear()
        for index in self._slots.active():
            self._slots.remove(index)

    def params_sha256(self) -> str:
        """Digest of the parameters the engine holds."""
        return params_sha256(self._model)

    @torch.inference_mode()
    def canary_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs [R] at temperature 1 of a given response."""
        ids = torch.tensor([[*prompt_tokens, *response_tokens]], device=self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, len(prompt_tokens) - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        return logprobs.gather(1, ids[0, len(prompt_tokens) :, None])[:, 0].cpu().numpy()

    def _decode(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """One forward pass over the newest token of every row; sampled tokens and their log-probs, [N] each."""
        slots, num_rows = self._slots, self._slots.num_rows
        positions = self._tensor(slots.position[:num_rows].copy())
        length = int(slots.position[:num_rows].max()) + 1
        self._cache.plan_decode(positions, length)
        hidden = torch.zeros((num_rows, length), dtype=self._model.dtype, device=self._device)
        hidden.masked_fill_(self._columns[:length] > positions[:, None], float("-inf"))
        output = self._model(
            input_ids=self._tensor(slots.current_tokens())[:, None],
            position_ids=positions[:, None],
            attention_mask=hidden[:, None, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        temperatures = self._tensor(slots.temperature[:num_rows])
        tokens, logprobs = sample(output.logits[:, -1], temperatures, self._generator, self._options())
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _options(self) -> Options | None:
        """What rows ask for beyond a temperature; None where no row asks for anything."""
        slots = self._slots
        if not slots.has_options:
            return None
        rows, tokens = slots.banned()
        known, limited = tokens < self._vocab_size, slots.limited()
        top_k = slots.top_k[limited]
        return Options(
            banned_rows=self._tensor(rows[known]),
            banned_tokens=self._tensor(tokens[known]),
            limited_rows=self._tensor(limited),
            top_k=self._tensor(np.where(top_k > 0, top_k, self._vocab_size)),
            top_p=self._tensor(slots.top_p[limited]),
            seeded=slots.seeded(),
        )

    @cached_property
    def _decode_texts(self) -> Decode:
        """Made for the first request with stop strings."""
        return response_decoder(load_tokenizer(self._folder, trust_remote_code=self._settings.trust_remote_code))

    def _completes_stop(self, tokens: NDArray[np.int64], request: Request) -> bool:
        return self._stops.completes(tokens.tolist(), request.sampling.stop)

    def _own_generator(self, request: Request) -> torch.Generator | None:
        seed = request.sampling.seed
        return None if seed is None or request.sampling.temperature == 0 else _generator(self._device, seed)

    def _refill(self) -> None:
        """Give waiting requests slots, computing the prompts that have no keys and values yet."""
        while self._waiting and self._slots.num_active < self.num_slots:
            num_free = self.num_slots - self._slots.num_active
            admitted, new_prompts = self._prompts.plan(self._waiting, num_free)
            if new_prompts:
                self._prefill([prompt for prompt, _ in new_prompts], [row for _, row in new_prompts])
            source = [self._prompts.row_of(request) for request in admitted]
            target = [self._slots.put(request, self._version, self._own_generator(request)) for request in admitted]
            longest = max(len(request.prompt_tokens) for request in admitted) - 1
            self._cache.copy_rows(self._tensor(np.array(source)), self._tensor(np.array(target)), longest)

    def _recompute(self) -> None:
        """Keys and values of active rows under the new weights; those of prompt rows are dropped."""
        self._prompts.clear()
        slots = self._slots
        rows = sorted((i for i in slots.active() if slots.position[i] > 0), key=lambda i: slots.position[i])
        sequences = [slots.tokens[index, : slots.position[index]].tolist() for index in rows]
        self._prefill(sequences, rows)
        self._stale = False

    def _prefill(self, sequences: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Compute keys and values of whole sequences into cache rows, right-padded, a few thousand tokens at a time."""
        start = 0
        while start < len(sequences):
            end, longest = start + 1, len(sequences[start])
            while end < len(sequences):
                wider = max(longest, len(sequences[end]))
                if wider * (end + 1 - start) > _PREFILL_TOKENS:
                    break
                end, longest = end + 1, wider
            ids = np.zeros((end - start, longest), np.int64)
            for line, sequence in zip(ids, sequences[start:end], strict=True):
                line[: len(sequence)] = sequence
            self._cache.plan_prefill(self._tensor(np.array(rows[start:end])))
            positions = self._columns[:longest].expand(end - start, longest)
            self._model.base_model(
                input_ids=self._tensor(ids), position_ids=positions, past_key_values=self._cache, use_cache=True
            )
            start = end

    def _tensor(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _sentence(error: Exception, num_slots: int) -> str:
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return f"the engine is out of memory with {num_slots} slots; lower searcher.num_slots ({text})"
    return f"the engine failed with {type(error).__name__}: {text}"


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _load_model(folder: Path, settings: EmbeddedSettings, max_len: int) -> Any:
    model = load_model(
        folder, dtype=settings.dtype, device=settings.device, trust_remote_code=settings.trust_remote_code
    )
    config = model.config
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_len > limit:
        raise ConfigError(
            f"searcher.max_prompt_tokens + searcher.max_response_tokens = {max_len}, "
            f"but the model's context is {limit} tokens; lower one of them"
        )
    odd_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if odd_layers and not (odd_layers == {"sliding_attention"} and window and max_len <= window):
        raise ConfigError(
            f"the embedded engine decodes full-attention models only; this one has layers of kind {sorted(odd_layers)}"
        )
    return model
