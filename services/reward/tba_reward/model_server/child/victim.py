"""The victim of red-teaming: a language model that replies to each attack several times, always in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from tba_reward.model_server.child import model_loader
from tba_reward.model_server.child.model_loader import LoadError, digest_folder, find_folder, load, longest_input
from tba_reward.model_server.child.server import NoScore
from tba_reward.model_server.model_messages import VictimSettings


class Victim:
    """A victim that is loaded.

    Of the model's own generation settings only the end-of-sequence tokens are used; `settings` says how it samples.

    Raises:
        LoadError: the files are not such a model, or it lacks the chat template that the settings ask for.
    """

    def __init__(self, settings: VictimSettings) -> None:
        folder = find_folder(settings.files)
        self.digest = digest_folder(folder)
        self._settings = settings
        self._model, self._tokenizer = load(settings.files, folder, AutoModelForCausalLM)
        limit = longest_input(self._model, self._tokenizer, None)
        self._max_tokens = limit - settings.max_reply_tokens
        if settings.form == "chat" and self._tokenizer.chat_template is None:
            raise LoadError(f"the tokenizer of {settings.files.path} has no chat template; leave `victim_form` out")
        self._chat = self._tokenizer.chat_template is not None and settings.form != "text"
        own = self._model.generation_config
        eos = own.eos_token_id if own is not None and own.eos_token_id is not None else self._tokenizer.eos_token_id
        self._eos = list(eos) if isinstance(eos, (list, tuple)) else [eos] if eos is not None else []
        self._model.generation_config = GenerationConfig(
            do_sample=False,  # `SeededSampling` leaves one token, so that "the most likely" is the one that was drawn
            max_new_tokens=settings.max_reply_tokens,
            eos_token_id=self._eos or None,
            pad_token_id=self._eos[0] if self._eos else 0,
        )

    @property
    def num_replies(self) -> int:
        """Replies to each attack."""
        return self._settings.num_replies

    @property
    def device_type(self) -> str:
        """`cpu`, `cuda`, ...: each draws other tokens with the same seed."""
        return self._model.device.type

    @property
    def max_reply_tokens(self) -> int:
        """Longest reply."""
        return self._settings.max_reply_tokens

    def encode(self, attack: str) -> list[int] | NoScore:
        """Return the tokens of an attack without the white space at its end."""
        attack = attack.rstrip()
        if self._chat:
            ids = model_loader.encode_chat(self._tokenizer, [{"role": "user", "content": attack}], to_be_continued=True)
        else:
            ids = list(self._tokenizer(model_loader.fill(self._settings.template, attack))["input_ids"])
        return model_loader.check_length(len(ids), self._max_tokens, "the attack") or ids

    @torch.inference_mode()
    def replies(self, attacks: Sequence[str], prompts: Sequence[list[int]]) -> list[list[str]]:
        """Return the texts of `num_replies` replies to each attack, generated as one batch.

        Args:
            attacks: the attacks, on which the draws depend.
            prompts: their tokens, from `encode`.
        """
        number = self._settings.num_replies
        rows = [prompt for prompt in prompts for _ in range(number)]
        ids, mask = model_loader.pad(rows, 0, side="left")  # [B, T]
        device = self._model.device
        processors = LogitsProcessorList()
        if self._settings.temperature > 0:
            seeds = [reply_seed(self._settings.seed, attack, n) for attack in attacks for n in range(number)]
            processors.append(SeededSampling(self._settings.temperature, self._settings.top_p, seeds, device))
        generate: Callable[..., Tensor] = self._model.generate  # type: ignore[assignment]  # of its mixin
        output = generate(input_ids=ids.to(device), attention_mask=mask.to(device), logits_processor=processors)
        texts = [self._text(row) for row in output[:, ids.shape[1] :].tolist()]
        return [texts[n : n + number] for n in range(0, len(texts), number)]

    def _text(self, tokens: list[int]) -> str:
        end = next((n for n, token in enumerate(tokens) if token in self._eos), len(tokens))
        text = self._tokenizer.decode(tokens[:end], skip_special_tokens=True)
        assert isinstance(text, str)
        return text.strip()


def reply_seed(seed: int, attack: str, number: int) -> int:
    """Return the seed of one reply: the same attack gets the same replies in every batch."""
    digest = hashlib.sha256(f"{seed}\0{number}\0{attack.rstrip()}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits


class SeededSampling(LogitsProcessor):
    """Draws the next token of every row with a generator of its own, and masks all others.

    The draw is the exponential form of the Gumbel-max trick: the token with the largest p / Exp(1) is distributed as p.
    Rounding errors of another batch change it only where two tokens are as close as the errors, unlike the inverse of a
    cumulative sum.
    """

    def __init__(self, temperature: float, top_p: float, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, input_ids: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Return minus infinity for every token but the one that is drawn."""
        probs = self._warpers(input_ids, scores.float()).softmax(-1)  # type: ignore[arg-type]  # they say LongTensor
        noise = torch.empty_like(probs)  # [B, V]
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        drawn = (probs / noise).argmax(-1, keepdim=True)  # [B, 1]
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)
