"""Completions of held-out prompts: every prompt greedily, and as many samples of each as the recipe asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tba.api import Lease, Prompt
from tba.config import Recipe
from tba.config.evaluation import Mode, PublishedSection
from tba.errors import ConfigError
from tba_searcher.engines.engine import Engine, EngineDiedError, EngineError
from tba_searcher.engines.tokenizer import Codec
from tba_searcher.generation.visits import Visit, WorkQueue

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Score:
    """A known score, or why it is unknown."""

    value: float | None
    reason: str | None = None
    """Why it is unknown."""
    reward_version: str | None = None
    is_wrong: bool = False
    """Whether the answer itself made scoring fail: it then counts as a failure, not as unknown."""


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """One completion of one prompt."""

    mode: Mode
    prompt: int
    """Number of the held-out prompt, from 0."""
    number: int
    """Number of its completion in this mode, from 0."""
    tokens: NDArray[np.int32]
    """[R], R >= 1, the end-of-sequence token included when it was sampled."""
    finish_reason: str
    text: str
    scores: dict[str, Score] = field(default_factory=dict)
    """The scores by task, which `score_all` fills in."""
    nll: float | None = None
    """Sum of -log pi_start over the tokens; None: not measured, or not finite."""


@dataclass(slots=True, kw_only=True)
class Answers:
    """All completions, in the order of prompts, greedy ones first."""

    prompts: Sequence[Prompt]
    prompt_tokens: list[tuple[int, ...]]
    answers: list[Answer] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """Why the engine cannot complete a prompt, by number of the prompt."""
    seconds: float = 0.0
    """Seconds that generation took."""

    def of(self, mode: Mode) -> list[list[Answer]]:
        """Return the answers of a mode as [prompt][number]; an empty list for a refused prompt."""
        parts: list[list[Answer]] = [[] for _ in self.prompts]
        for answer in self.answers:
            if answer.mode == mode:
                parts[answer.prompt].append(answer)
        return parts

    def tasks_of(self, prompt: int, section: PublishedSection) -> Sequence[str]:
        """Return the tasks that completions of a prompt are scored under, each once."""
        return list(dict.fromkeys(section.tasks)) or [self.prompts[prompt].task]


def answer_all(
    engine: Engine, codec: Codec, recipe: Recipe, prompts: Sequence[Prompt], *, on_progress: OnProgress
) -> Answers:
    """Complete every prompt as searchers do in an evaluation, or in training if its split is `train`.

    Raises:
        EngineDiedError: the engine cannot continue.
        ConfigError: the engine refused every prompt, or the messages of one cannot be rendered.
    """
    found = Answers(prompts=prompts, prompt_tokens=[codec.prompt_tokens(prompt) for prompt in prompts])
    eos_ids = tuple(sorted({*engine.default_eos_ids, *codec.eos_ids}))
    queue = WorkQueue(recipe.searcher, run_seed=recipe.run.seed, eos_ids=eos_ids)
    pinned = None if prompts[0].split == "train" else engine.version
    # prompt by prompt, so that completions of one prompt share its prefill
    for mode, num in modes_of(recipe.eval.published).items():
        for index, (prompt, tokens) in enumerate(zip(prompts, found.prompt_tokens, strict=True)):
            lease = Lease(
                lease_id=f"{mode}/{index}",
                kind="greedy" if mode == "greedy" else "sample",
                visit_id=f"{mode}/{index}",
                prompt=prompt,
                num_rollouts=num,
                temperature=temperature_of(mode, recipe),
                expires_in_s=0.0,  # nobody else waits for it
            )
            queue.add(Visit(lease=lease, prompt_tokens=tokens, pinned=pinned))
    num_all, num_tokens, start_s = queue.num_unsubmitted, 0, time.monotonic()
    done = []
    while queue.open_visits() or engine.num_active + engine.num_waiting:
        # no more than can be decoded: a refused prompt then costs one request, not all of its samples
        while engine.num_active + engine.num_waiting < engine.num_slots:
            requests = queue.take_requests(1, pinned=pinned)
            if not requests:
                break
            try:
                engine.submit(requests[0])
            except EngineDiedError:
                raise
            except EngineError as error:
                # the evaluation continues without this prompt, and the report names it
                index = int(requests[0].request_id.split("/")[1])
                found.refused[index] = str(error)
                queue.drop([visit for visit in queue.open_visits() if visit.lease.lease_id.endswith(f"/{index}")])
        for completion in engine.step():
            queue.add_completion(completion)
            done.append(completion)
            num_tokens += len(completion.response_tokens)
        on_progress(f"{len(done)} of {num_all} completions, {num_tokens / (time.monotonic() - start_s):.0f} tokens/s")
    found.seconds = time.monotonic() - start_s
    if not done:
        raise ConfigError(f"none of the {len(prompts)} prompts can be completed: {found.refused[0]}")
    for completion, text in zip(done, codec.decode_responses(done), strict=True):
        mode, index, number = completion.request_id.split("/")
        found.answers.append(
            Answer(
                mode="greedy" if mode == "greedy" else "sampled",
                prompt=int(index),
                number=int(number) - 1,
                tokens=completion.response_tokens,
                finish_reason=completion.finish_reason,
                text=text,
            )
        )
    # completions end in any order, and the files must not depend on it
    found.answers.sort(key=lambda answer: (answer.mode, answer.prompt, answer.number))
    return found


def modes_of(section: PublishedSection) -> dict[Mode, int]:
    """Return the modes that the recipe asks for, each with its number of completions per prompt."""
    numbers: dict[Mode, int] = {"greedy": int(section.greedy), "sampled": section.num_samples}
    return {mode: num for mode, num in numbers.items() if num}


def temperature_of(mode: Mode, recipe: Recipe) -> float:
    """Return the sampling temperature of a mode; greedy is 0."""
    if mode == "greedy":
        return 0.0
    temperature = recipe.eval.published.temperature
    return recipe.model.policy_temperature if temperature is None else temperature
