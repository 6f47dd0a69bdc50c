"""The victim of red-teaming: a language model that replies to each attack several times, always in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from tba.config.reward import RedteamSpec
from tba_reward.model_server.child import model_loader
from tba_reward.model_server.child.model_loader import LoadError, digest_folder, find_folder, load, longest_input
from tba_reward.scorer import Failure


class Victim:
    """A victim whose replies transformers generates.

    Of the model's own generation settings only the end-of-sequence tokens are used; `spec` says how it samples.

    Raises:
        LoadError: the files are not such a model, or it lacks the chat template that the settings ask for.
    """

    def __init__(self, spec: RedteamSpec) -> None:
        folder = find_folder(spec.victim)
        self.digest = digest_folder(folder)
        self._spec = spec
        self._model, self._tokenizer = load(spec.victim, folder, spec, AutoModelForCausalLM)
        if spec.victim_input == "chat" and self._tokenizer.chat_template is None:
            raise LoadError(f"the tokenizer of {spec.victim} has no chat template; leave `victim_input` out")
        self._chat = self._tokenizer.chat_template is not None and spec.victim_input != "text"
        self.device_type = self._model.device.type
        """`cpu`, `cuda`, ...: each draws other tokens with the same seed."""
        try:
            own = GenerationConfig.from_pretrained(folder)
        except OSError:  # there is no such file
            own = GenerationConfig.from_model_config(self._model.config)
        eos: Any = own.eos_token_id if own.eos_token_id is not None else self._tokenizer.eos_token_id
        self._eos: list[int] = [eos] if isinstance(eos, int) else list(eos or [])
        """The end-of-sequence tokens of the model's generation settings, else that of its tokenizer."""
        limit = longest_input(self._model, self._tokenizer)
        if spec.max_attack_tokens is not None:
            limit = min(limit, len(self._prompt("")) + spec.max_attack_tokens + spec.max_reply_tokens)
        self._context_tokens = limit
        """Most tokens of a prompt and its reply."""
        self._model.generation_config = GenerationConfig(
            do_sample=False,  # `SeededSampling` leaves one token, so that "the most likely" is the one that was drawn
            max_new_tokens=spec.max_reply_tokens,
            eos_token_id=self._eos or None,
            pad_token_id=self._eos[0] if self._eos else 0,
        )

    def encode(self, attack: str) -> list[int] | Failure:
        """Return the tokens of an attack without the white space at its end."""
        ids = self._prompt(attack.rstrip())
        limit = self._context_tokens - self._spec.max_reply_tokens
        return model_loader.check_length(len(ids), limit, "the attack in its template") or ids

    def replies(self, attacks: Sequence[str], prompts: Sequence[list[int]]) -> list[list[str | None]]:
        """Return the texts of `num_replies` replies to each attack, generated as one batch; None as in `_generate`."""
        number = self._spec.num_replies
        rows = [prompt for prompt in prompts for _ in range(number)]
        seeds = [reply_seed(attack, n) for attack in attacks for n in range(number)]
        texts = list[str | None]()
        for tokens in self._generate(rows, seeds):
            kept = [] if tokens is None else tokens[: self._num_before_end(tokens)]
            text: Any = self._tokenizer.decode(kept, skip_special_tokens=True)
            texts.append(None if tokens is None else text.strip())
        return [texts[n : n + number] for n in range(0, len(texts), number)]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[list[int] | None]:
        """Return the tokens of one reply to each prompt, in order; what follows an end of sequence is not read.

        None: the logits of one of its tokens are not finite, so that it was not drawn from the model.
        """
        ids, mask = model_loader.pad(prompts, 0, side="left")  # [B, T]
        device = self._model.device
        check = LogitsCheck()
        processors = LogitsProcessorList([check])
        if self._spec.temperature > 0:
            processors.append(SeededSampling(self._spec.temperature, self._spec.top_p, seeds, device))
        generate: Callable[..., Tensor] = self._model.generate  # type: ignore[assignment]  # of its mixin
        output = generate(input_ids=ids.to(device), attention_mask=mask.to(device), logits_processor=processors)
        rows, is_sound = output[:, ids.shape[1] :].tolist(), check.is_sound()
        # a row that has ended goes on until all have, and that is not read
        return [
            row if all(sound[: self._num_before_end(row) + 1]) else None
            for row, sound in zip(rows, is_sound, strict=True)
        ]

    def _prompt(self, attack: str) -> list[int]:
        if self._chat:
            turns = [{"role": "user", "content": attack}]
            return model_loader.encode_chat(self._tokenizer, turns, to_be_continued=True)
        return list(self._tokenizer(model_loader.fill(self._spec.victim_template, attack))["input_ids"])

    def _num_before_end(self, tokens: list[int]) -> int:
        return next((n for n, token in enumerate(tokens) if token in self._eos), len(tokens))


def reply_seed(attack: str, number: int) -> int:
    """Return the seed of one reply: the same attack gets the same replies in every batch."""
    digest = hashlib.sha256(f"{number}\0{attack.rstrip()}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits


class LogitsCheck(LogitsProcessor):
    """Notes at every token which rows have logits that give probabilities, and changes none."""

    def __init__(self) -> None:
        self._is_sound: list[Bool[Tensor, " B"]] = []

    def __call__(self, input_ids: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Return the logits as they are."""
        # a model may give single tokens minus infinity, so the sum decides
        self._is_sound.append(scores.logsumexp(-1).isfinite())
        return scores

    def is_sound(self) -> list[list[bool]]:
        """Return one value per row and token."""
        return torch.stack(self._is_sound, dim=1).tolist()


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
