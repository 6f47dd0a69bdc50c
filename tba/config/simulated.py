"""The section `searcher.simulated`: how an engine behaves that pretends to decode (`searcher.engine = "simulated"`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.config.base import StrictModel


class SimulatedSection(StrictModel):
    """A simulated engine: no model and no torch; it takes the time that a real one would, and makes tokens up.

    It rehearses a deployment: everything else of the run is real. What is trained on its rollouts is worth nothing.
    """

    tokens_per_s: float = Field(default=50.0, gt=0)
    """Tokens that one slot decodes per second when few slots are busy."""
    batch_tokens_per_s: float | None = Field(default=None, gt=0)
    """Most tokens per second of all slots together; none: every slot always decodes `tokens_per_s`."""
    tokens_per_step: int = Field(default=1, ge=1, le=1000)
    """Tokens of each row that one step decodes. More costs less CPU; requests and weights wait for the step to end."""
    lengths: Literal["lognormal", "pareto", "fixed"] = "lognormal"
    """Distribution of response lengths, the end-of-sequence token included; cut at `max_response_tokens` like those of
    a real engine. `fixed`: every response has the median."""
    median_response_tokens: float = Field(default=128.0, ge=1)
    """Half of the responses are longer, whatever the distribution."""
    lognormal_sigma: float = Field(default=0.8, gt=0, le=10)
    """Standard deviation of the logarithm of the length."""
    pareto_tail: float = Field(default=1.5, gt=0, le=100)
    """Tail index: a response is longer than x with a probability of about x ** -pareto_tail. Small is a long tail."""
    start_s: float = Field(default=0.0, ge=0)
    """How long the engine takes to start."""
    load_s: float = Field(default=0.0, ge=0)
    """How long new weights take to load; generation stands still meanwhile."""
    crash_every_s: float | None = Field(default=None, gt=0)
    """Mean seconds until the engine dies and says so, exponentially distributed; the searcher then ends with an error.
    None: never."""
    preempt_every_s: float | None = Field(default=None, gt=0)
    """Mean seconds until the searcher is gone without a word, as when its machine is taken away. None: never."""
