"""Accuracy of weights on held-out prompts, measured after a run, and when a curve of it reached a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tba_reward.scorer import Item, params_of
from tba_reward.scorers.last_number import score
from tba_reward.service import BUILT_IN
from tba_searcher.engines.tokenizer import TextCodec
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tba.api import Prompt
from tba.config import Recipe
from tba.config.reward import ExactSpec, LastNumberSpec
from tba.errors import ConfigError
from tba_cli.prompts.reader import heldout_prompts

Rows = list[tuple[tuple[int, ...], Prompt]]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Pass@1 at the policy temperature, and greedy accuracy."""

    pass_at_1: float
    greedy: float


def reached(curve: Iterable[tuple[float, float]], target: float) -> float | None:
    """Return when a curve of (seconds, accuracy) first reaches a target; None: never.

    Between two points it is a line, so that the interval of publications does not decide it.
    """
    before: tuple[float, float] | None = None
    for at, accuracy in curve:
        if accuracy >= target:
            if before is None:
                return at
            return before[0] + (target - before[1]) / (accuracy - before[1]) * (at - before[0])
        before = (at, accuracy)
    return None


def ratio_of(base: float | None, mine: float | None) -> float | None:
    """Return base by mine, where None is infinity: a target that was never reached. Two of those have no ratio."""
    if mine is None:
        return None if base is None else 0.0
    if base is None:
        return float("inf")
    return base / mine if mine else None


def rule_of(recipe: Recipe) -> ExactSpec | LastNumberSpec:
    """Return what decides whether a response of the recipe's task is right.

    Raises:
        ConfigError: it is none of the two kinds that can be measured here.
    """
    tasks = sorted({prompt.task for prompt in heldout_prompts(recipe)})
    rewards = {**BUILT_IN, **recipe.reward.tasks}
    specs = [spec for task in tasks for spec in rewards[task].scorers]
    spec = specs[0] if len(specs) == 1 else None
    if isinstance(spec, LastNumberSpec) and spec.field == "answer":
        return spec
    if isinstance(spec, ExactSpec) and (spec.field, spec.compare) == ("answer", "text"):
        return spec
    raise ConfigError(
        f"the accuracy of {', '.join(tasks) or 'no task'} cannot be measured: the reward must be one scorer, `exact` "
        "(of texts) or `last_number`, with the answer in data.answer"
    )


def judge_of(recipe: Recipe, model_folder: Path, num_prompts: int | None = None) -> Judge:
    """Return the judge of a recipe: its held-out prompts, its temperature, its longest response.

    Raises:
        ConfigError: its task cannot be measured.
    """
    if recipe.searcher.tasks_with_minimum:
        raise ConfigError("a task has min_response_tokens, which the accuracy here knows nothing of")
    return Judge(
        model_folder,
        heldout_prompts(recipe)[:num_prompts],
        rule=rule_of(recipe),
        temperature=recipe.model.policy_temperature,
        max_response_tokens=recipe.searcher.max_response_tokens,
    )


class Judge:
    """Measures models of one shape on the same prompts.

    Args:
        rule: `exact`: `data.answer` is the only right response, and its probability is exact by teacher forcing;
            `last_number`: one response to each prompt is sampled, with the same seed for every model.
        temperature: of the policy; greedy accuracy does not depend on it.

    Raises:
        ConfigError: a prompt has no answer, or one that is longer than a response may be.
    """

    def __init__(
        self,
        model_folder: Path,
        prompts: list[Prompt],
        *,
        rule: ExactSpec | LastNumberSpec,
        temperature: float,
        max_response_tokens: int,
    ) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
        self._codec = TextCodec(model_folder)
        self._rule, self._temperature, self._max_response_tokens = rule, temperature, max_response_tokens
        self._num_prompts = len(prompts)
        # forced answers in batches of one length: no padding that could be treated in two ways
        self._groups: dict[tuple[int, ...], Rows] = {}
        for prompt in prompts:
            if not isinstance(answer := prompt.data.get("answer"), str):
                raise ConfigError(f"prompt {prompt.prompt_id} has no text data.answer")
            ids, num_tokens = self._codec.encode_prompt(prompt.text), len(self._codec.encode_response(answer))
            if num_tokens > max_response_tokens:
                raise ConfigError(
                    f"the answer of prompt {prompt.prompt_id} takes {num_tokens} tokens, and a response has "
                    f"{max_response_tokens} (searcher.max_response_tokens)"
                )
            shape = (len(ids), num_tokens) if isinstance(rule, ExactSpec) else ()
            self._groups.setdefault(shape, []).append((ids, prompt))

    @torch.no_grad()
    def measure(self, tensors: dict[str, Tensor]) -> Accuracy:
        """Return the accuracy with these weights; a missing tensor is an error."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(tensors[name])
        if isinstance(self._rule, LastNumberSpec):
            torch.manual_seed(0)
            right = [
                sum(self._num_right(rows, is_greedy) for rows in self._groups.values()) for is_greedy in (False, True)
            ]
        else:
            found = [self._forced(rows) for rows in self._groups.values()]
            right = [sum(values) for values in zip(*found, strict=True)]
        return Accuracy(*(value / self._num_prompts for value in right))

    def _forced(self, rows: Rows) -> tuple[float, int]:
        """Return the sum of the probabilities of the right responses, and how many greedy decoding finds."""
        prompts = torch.tensor([ids for ids, _ in rows])
        answers = torch.tensor([self._codec.encode_response(prompt.data["answer"]) for _, prompt in rows])
        inputs = torch.cat([prompts, answers[:, :-1]], dim=1)
        logits = self._model(input_ids=inputs, logits_to_keep=answers.shape[1]).logits
        logprobs = (logits / self._temperature).log_softmax(dim=-1).gather(2, answers[:, :, None])[:, :, 0]
        is_greedy = (logits.argmax(dim=-1) == answers).all(dim=1)
        return float(logprobs.double().sum(dim=1).exp().sum()), int(is_greedy.sum())

    def _num_right(self, rows: Rows, is_greedy: bool) -> int:
        responses = self._generate([ids for ids, _ in rows], is_greedy)
        params = params_of(self._rule)
        texts = (self._tokenizer.decode(ids, skip_special_tokens=True) for ids in responses)
        items = (Item(prompt=p.text, response=text, data=p.data) for (_, p), text in zip(rows, texts, strict=True))
        return sum(score(item, params) == 1.0 for item in items)

    def _generate(self, prompts: Sequence[Sequence[int]], is_greedy: bool) -> list[list[int]]:
        """Return one response to each prompt. Pad prompts on the left; rows that have ended leave the batch."""
        longest = max(map(len, prompts))
        inputs = torch.tensor([[0] * (longest - len(ids)) + [*ids] for ids in prompts])  # [B, P]
        is_token = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])  # [B, P + tokens]
        responses: list[list[int]] = [[] for _ in prompts]
        active, cache = list(range(len(prompts))), DynamicCache()
        for _ in range(self._max_response_tokens):
            positions = (is_token.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
            logits = self._model(
                input_ids=inputs,
                attention_mask=is_token,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            ).logits[:, -1]
            probs = (logits / self._temperature).softmax(dim=-1)
            chosen = logits.argmax(dim=-1) if is_greedy else probs.multinomial(1)[:, 0]
            for row, token in zip(active, chosen.tolist(), strict=True):
                responses[row].append(token)
            keep = (chosen != self._tokenizer.eos_token_id).nonzero()[:, 0]
            if not len(keep):
                break
            if len(keep) < len(active):
                cache.batch_select_indices(keep)
                active = [active[index] for index in keep.tolist()]
            inputs = chosen[keep, None]
            is_token = torch.nn.functional.pad(is_token[keep], (0, 1), value=1)
        return responses


def read_tensors(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return the tensors of safetensors files as float32."""
    return {name: tensor.float() for path in paths for name, tensor in load_file(path).items()}
