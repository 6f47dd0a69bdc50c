"""Computes the result of an evaluation lease: rewards, response lengths, and the diversity of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from tba.api import EvalResult
from tba.errors import ConfigError
from tba.evaluation.statistics import mean_of_pairs
from tba.fields import bounded_or_none
from tba.model_folders import check_load_report
from tba_searcher.generation.visits import Visit

if TYPE_CHECKING:
    from torch import Tensor

_BATCH_TEXTS = 32


def result_of(
    visit: Visit, texts: Sequence[str], rewards: Sequence[float | None], *, embedder: Embedder | None
) -> EvalResult:
    """Return the result of a complete evaluation visit (blocking: runs the embedding model).

    Args:
        texts, rewards: one for each completion, in order.
        embedder: None when no `eval.embedding_model` is named.
    """
    lengths = [len(completion.response_tokens) for completion in visit.completions]
    plain = EvalResult(lease_id=visit.lease.lease_id, rewards=list(rewards), num_response_tokens=lengths)
    if visit.lease.kind != "sample":  # one greedy completion has no diversity
        return plain
    responses = [without_end(each.response_tokens, each.finish_reason) for each in visit.completions]
    distance = None
    if embedder is not None:
        distance, _ = mean_of_pairs(cosine_distances(embedder.embed(texts)).numpy())
    distinct = {f"distinct_{n}": distinct_share(responses, n) for n in (1, 2, 3)}
    return plain.model_copy(
        update={**distinct, "embedding_distance": None if distance is None else bounded_or_none(distance)}
    )


def failed_result(visit: Visit) -> EvalResult:
    """Return the result of a lease whose prompt cannot be sampled."""
    num = visit.lease.num_rollouts
    return EvalResult(lease_id=visit.lease.lease_id, rewards=[None] * num, num_response_tokens=[0] * num)


def without_end(tokens: NDArray[np.int32], finish_reason: str) -> NDArray[np.int32]:
    """Return a response without its end-of-sequence token, which it has (as the last one) if it finished by `stop`."""
    return tokens[: -1 if finish_reason == "stop" else None]


def distinct_share(responses: Sequence[NDArray[np.int32]], n: int) -> float | None:
    """Return distinct-n (arXiv 1510.03055): distinct n-grams / all n-grams of all responses; None if there are none."""
    grams = [tuple(response[at : at + n].tolist()) for response in responses for at in range(len(response) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def cosine_distances(embeddings: Float[Tensor, "N D"]) -> Float[Tensor, "N N"]:
    """Return 1 - cosine similarity of every pair.

    A zero vector is an empty text: it is at distance 0 from another empty text and 1 from any other.
    """
    import torch

    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    similarity = unit @ unit.T  # [N, N]
    empty = embeddings.abs().amax(dim=1) == 0
    # normalising a zero vector leaves it zero, and its similarity to itself would be 0
    similarity[empty[:, None] & empty] = 1.0
    return 1.0 - similarity


class Embedder:
    """Embeds texts with a Hugging Face encoder on the CPU, mean-pooled over tokens."""

    def __init__(self, folder: str | Path) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        auto_model: Any = AutoModel
        try:
            files: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, **files)
            model, report = auto_model.from_pretrained(
                folder,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # the report names them
                **files,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ConfigError(f"eval.embedding_model {str(folder)!r} cannot be loaded: {first_line}") from None
        # the mean over tokens does not use a pooler, which many encoders come without
        where, needs = f"eval.embedding_model {str(folder)!r}", lambda name: not name.startswith("pooler.")
        check_load_report(report, model, where=where, is_needed=needs)
        self._model: Any = model.eval()
        self._tokenizer.padding_side = "right"  # else absolute positions depend on the longest text of a batch
        if self._tokenizer.pad_token is None:
            raise ConfigError(f"eval.embedding_model {str(folder)!r}: its tokenizer has no padding token")
        limit = getattr(self._model.config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        self._max_tokens = min(limit, self._tokenizer.model_max_length)

    def embed(self, texts: Sequence[str]) -> Float[Tensor, "N D"]:
        """Return one vector per text; an empty text is the zero vector."""
        import torch

        with torch.inference_mode():
            parts, cut = list[Any](), {"padding": True, "truncation": True, "max_length": self._max_tokens}
            for at in range(0, len(texts), _BATCH_TEXTS):
                some = list(texts[at : at + _BATCH_TEXTS])
                batch = self._tokenizer(some, return_tensors="pt", **cut)
                if not batch["input_ids"].numel():
                    weight = self._model.get_input_embeddings().weight
                    parts.append(weight.new_zeros(len(some), self._model.config.hidden_size))
                    continue
                ids, attended = batch["input_ids"], batch["attention_mask"]
                hidden = self._model(input_ids=ids, attention_mask=attended).last_hidden_state
                mask = attended[:, :, None].to(hidden.dtype)  # [N, T, 1]
                parts.append((hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0))
            return torch.cat(parts)
