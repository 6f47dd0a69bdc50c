"""The two perplexities of the TL;DR task: how likely the starting model finds the completions.

Per token: exp(NLL of all completions / number of their tokens). As published (bbartoldson/TBA, src/perplexity.py): the
mean over completions of exp(NLL of the completion / (tokens of prompt and completion - 1)). It is far lower, because
it counts the tokens of the prompt but not their NLL. Both use the model at temperature 1, and include the
end-of-sequence token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tba.config import Recipe
from tba.errors import ConfigError
from tba.evaluation.evaluation_job import Estimate
from tba.evaluation.statistics import exp_of_ratio, finite_exp, mean_of_prompts
from tba.wire import single_turn
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.engines.torch.reference_logprobs import StartingModel
from tba_searcher.evaluation.answers import Answer, Answers, OnProgress

PART_ANSWERS = 64


def measure_likelihoods(recipe: Recipe, folder: Path, answers: Answers, *, on_progress: OnProgress) -> None:
    """Set the `nll` of every answer, in nats, under the model in `folder`; None where it is not finite."""
    codec = TextCodec(folder, trust_remote_code=recipe.model.trust_remote_code)
    # with another tokenizer the token ids mean something else; a few prompts show it, as nearly every text differs
    for prompt, tokens in zip(answers.prompts[:8], answers.prompt_tokens, strict=False):
        if codec.prompt_tokens(prompt) != tokens:
            raise ConfigError(
                f"eval.published.perplexity: the starting model in {folder} has another tokenizer than the evaluated "
                f"model (prompt {prompt.prompt_id!r}); evaluate a model that was trained from it, or set it to false"
            )
    model = StartingModel(
        folder,
        temperature=1.0,
        dtype=recipe.model.dtype,
        device=recipe.searcher.device,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    for at in range(0, len(answers.answers), PART_ANSWERS):
        part = answers.answers[at : at + PART_ANSWERS]
        # in parts, so that progress is seen; the model itself cuts them into passes
        prompts = [answers.prompt_tokens[answer.prompt] for answer in part]
        sums = model.sums(
            [single_turn(*pair, "stop") for pair in zip(prompts, (each.tokens for each in part), strict=True)]
        )
        for answer, value in zip(part, sums, strict=True):
            answer.nll = -value if math.isfinite(value) else None
        on_progress(f"{at + len(part)} of {len(answers.answers)} completions under the starting model")


def perplexities(parts: Sequence[Sequence[Answer]], answers: Answers) -> dict[str, Estimate]:
    """Return the perplexities `per_token` and `published` of one mode, whose answers are `parts[prompt][number]`."""
    sums, lengths, published = [], [], []
    for part in parts:
        known = [(answer.nll, answer) for answer in part if answer.nll is not None]
        sums.append([nll for nll, _ in known])
        lengths.append([float(len(answer.tokens)) for _, answer in known])
        # as published: the tokens of the prompt are counted, their NLL is not
        whole = (nll / (len(answers.prompt_tokens[one.prompt]) + len(one.tokens) - 1) for nll, one in known)
        published.append([value for value in map(finite_exp, whole) if value is not None])
    return {"per_token": exp_of_ratio(sums, lengths), "published": mean_of_prompts(published)}
