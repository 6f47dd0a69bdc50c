"""Details of a batch for trackers that can draw them: histograms, and a table of sample rollouts.

loop                        make_details: counts bins, picks some rollouts, copies what the table needs (bounded)
thread of each tracker      Details.rows: decodes the prompts, the first time with a load of the tokenizer
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_trainer.learner.forward_backward import ForwardResult

MAX_ROWS = 8
"""Rows of a table: the best, the worst, the others drawn at random."""
NUM_BEST = NUM_WORST = 2
MAX_TEXT_CHARS = 2000
"""Longer texts are cut."""
MAX_PROMPT_TOKENS = MAX_TEXT_CHARS
"""Of a longer prompt the beginning is decoded: a token is seldom less than a character."""
MAX_BINS = 64
COLUMNS = (
    "which",
    "prompt",
    "completion",
    "reward",
    "reward_parts",
    "version",
    "policy_age",
    "advantage",
    "task",
    "prompt_id",
    "rollout_id",
)
"""Of a table of sample rollouts. `advantage` is empty where the objective has none, `reward_parts` is JSON."""
Cell = str | float | int | None
log = get_logger("tracking")


class PromptTexts:
    """Turns the tokens of prompts into text, as the policy reads them: with special tokens. For any thread.

    Args:
        folder: of the model, which has its tokenizer.
    """

    def __init__(self, folder: str | Path, *, trust_remote_code: bool) -> None:
        self._folder, self._trust_remote_code = folder, trust_remote_code
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._has_failed = False

    def of(self, tokens: NDArray[np.int32]) -> str | None:
        """Return the text; None where the tokenizer cannot be loaded, which is logged once."""
        with self._lock:
            if self._tokenizer is None and not self._has_failed:
                try:
                    self._tokenizer = self._load()
                except Exception as error:  # of a class of any model: a table without prompts is better than none
                    self._has_failed = True
                    log.warning("prompts_not_shown", error=f"{type(error).__name__}: {error}")
            return None if self._tokenizer is None else self._tokenizer.decode(tokens.tolist())

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            self._folder, trust_remote_code=self._trust_remote_code, local_files_only=True
        )


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of the values in bins [edges[i], edges[i + 1]); the last bin has both edges."""

    counts: tuple[int, ...]
    edges: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row of the table of sample rollouts. Tokens and text are cut."""

    which: Literal["best", "worst", "random"]
    prompt_tokens: NDArray[np.int32]
    completion: str
    reward: float | None
    reward_parts: Mapping[str, float] | None
    version: PolicyVersion
    policy_age: int
    advantage: float | None
    task: str
    prompt_id: str
    rollout_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Histograms and sample rollouts of the batch of an optimizer step; empty where they are not due."""

    version: PolicyVersion
    texts: PromptTexts
    at_s: float = field(default_factory=time.time)
    """Unix seconds at which the details were made."""
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """`policy_age`, in optimizer steps, and `reward`."""
    samples: Sequence[Sample] = ()

    def rows(self) -> list[list[Cell]]:
        """Return the table of sample rollouts, with `COLUMNS`. Decodes, so not for the training thread."""
        return [
            [
                sample.which,
                _cut(self.texts.of(sample.prompt_tokens)),
                sample.completion,
                sample.reward,
                None if sample.reward_parts is None else json.dumps(sample.reward_parts),
                str(sample.version),
                sample.policy_age,
                sample.advantage,
                sample.task,
                sample.prompt_id,
                sample.rollout_id,
            ]
            for sample in self.samples
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailsMaker:
    """Decides which steps have details, and makes them."""

    texts: PromptTexts
    histogram_interval: int
    """Steps; 0: never."""
    sample_interval: int

    def make(self, version: PolicyVersion, results: Sequence[ForwardResult]) -> Details | None:
        """Return the details of a step that are due; None where none are.

        Args:
            results: of the rollouts that the step had; may be empty.
        """
        has_histograms, has_samples = (
            interval > 0 and version.step % interval == 0
            for interval in (self.histogram_interval, self.sample_interval)
        )
        if not results or not (has_histograms or has_samples):
            return None
        rewards = [result.rollout.reward for result in results if result.rollout.reward is not None]
        values = {"policy_age": [result.policy_age for result in results], "reward": rewards}
        return Details(
            version=version,
            texts=self.texts,
            histograms={n: histogram_of(found) for n, found in values.items() if found} if has_histograms else {},
            samples=pick_samples(results, seed=version.step) if has_samples else (),
        )


def histogram_of(values: Sequence[float]) -> Histogram:
    """Count finite values, at least one: in a bin per whole number where they are few whole numbers, else in `MAX_BINS`
    bins of one width."""
    found = np.asarray(values, dtype=np.float64)
    low, high = found.min(), found.max()
    if high - low < MAX_BINS and (found == np.round(found)).all():
        edges = np.arange(low, high + 2) - 0.5
        counts = np.bincount((found - low).astype(np.int64))
    else:
        counts, edges = np.histogram(found, bins=MAX_BINS)
    return Histogram(counts=tuple(counts.tolist()), edges=tuple(edges.tolist()))


def pick_samples(results: Sequence[ForwardResult], *, seed: int) -> list[Sample]:
    """Return the best, the worst and some other rollouts of a batch, `MAX_ROWS` at most.

    Args:
        seed: of the choice. The trainer's own random numbers are left alone: trackers must not change a run.
    """
    known = [result for result in results if result.rollout.reward is not None]
    order = sorted(known, key=lambda result: result.rollout.reward or 0.0, reverse=True)
    best, rest = order[:NUM_BEST], order[NUM_BEST:]
    worst = rest[::-1][:NUM_WORST]
    others = rest[: len(rest) - len(worst)]
    chosen = random.Random(seed).sample(others, min(len(others), MAX_ROWS - NUM_BEST - NUM_WORST))
    return [
        *(_sample("best", result) for result in best),
        *(_sample("worst", result) for result in worst),
        *(_sample("random", result) for result in chosen),
    ]


def _sample(which: Literal["best", "worst", "random"], result: ForwardResult) -> Sample:
    rollout = result.rollout
    return Sample(
        which=which,
        prompt_tokens=rollout.prompt_tokens[:MAX_PROMPT_TOKENS].copy(),  # a view would keep the payload in memory
        completion=_cut(rollout.response_text) or "",
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        version=rollout.version,
        policy_age=result.policy_age,
        advantage=result.advantage,
        task=rollout.task,
        prompt_id=rollout.prompt_id,
        rollout_id=rollout.rollout_id.hex(),
    )


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= MAX_TEXT_CHARS:
        return text
    return text[: MAX_TEXT_CHARS - 1] + "…"
