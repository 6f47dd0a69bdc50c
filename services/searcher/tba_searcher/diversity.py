"""How different the samples of one prompt are: distinct n-grams of tokens, and distances between embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from tba.errors import ConfigError

if TYPE_CHECKING:  # searchers without a model run without torch
    from torch import Tensor

_BATCH_TEXTS = 32


def distinct_share(responses: Sequence[NDArray[np.int32]], n: int) -> float | None:
    """Different n-grams / all n-grams over all responses together (arXiv 1510.03055); None where there is none."""
    grams = [tuple(response[at : at + n].tolist()) for response in responses for at in range(len(response) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def mean_cosine_distance(embeddings: Float[Tensor, "N D"]) -> float | None:
    """Mean of `cosine_distances` over all pairs; None for fewer than two."""
    import torch

    num = len(embeddings)
    if num < 2:
        return None
    pairs = torch.triu_indices(num, num, offset=1)
    return float(cosine_distances(embeddings)[pairs[0], pairs[1]].mean())


def cosine_distances(embeddings: Float[Tensor, "N D"]) -> Float[Tensor, "N N"]:
    """1 - cosine similarity of every pair.

    A zero vector is an empty text: it is at distance 0 from another empty text and 1 from any other.
    """
    import torch

    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    similarity = unit @ unit.T  # [N, N]
    empty = embeddings.abs().amax(dim=1) == 0
    similarity[empty[:, None] & empty] = 1.0
    return 1.0 - similarity


class Embedder:
    """Texts to vectors with a Hugging Face encoder, mean-pooled over its tokens, on the CPU.

    Raises:
        ConfigError: the folder holds no encoder with a tokenizer that can pad.
    """

    def __init__(self, folder: str | Path) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        auto_model: Any = AutoModel
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = auto_model.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        except (OSError, ValueError, KeyError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ConfigError(f"eval.embedding_model {str(folder)!r} cannot be loaded: {first_line}") from None
        self._tokenizer.padding_side = "right"  # absolute positions must not depend on the longest text of a batch
        if self._tokenizer.pad_token is None:
            raise ConfigError(f"eval.embedding_model {str(folder)!r}: its tokenizer has no padding token")
        limit = getattr(self._model.config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        self._max_tokens = min(limit, self._tokenizer.model_max_length)

    def embed(self, texts: Sequence[str]) -> Float[Tensor, "N D"]:
        """One vector per text; an empty text is the zero vector."""
        import torch

        with torch.inference_mode():
            parts = [self._embed(texts[at : at + _BATCH_TEXTS]) for at in range(0, len(texts), _BATCH_TEXTS)]
            return torch.cat(parts)

    def _embed(self, texts: Sequence[str]) -> Tensor:
        batch = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        )
        if not batch["input_ids"].numel():
            return self._model.get_input_embeddings().weight.new_zeros(len(texts), self._model.config.hidden_size)
        hidden = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        mask = batch["attention_mask"][:, :, None].to(hidden.dtype)  # [N, T, 1]
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
