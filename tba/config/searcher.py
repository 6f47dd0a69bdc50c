"""The searchers' section of a recipe: the engine, how completions are sampled, and how long things may take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tba.config.base import StrictModel
from tba.config.bounded import MAX_TEMPERATURE, MIN_TEMPERATURE, Temperature
from tba.config.schedules import Schedule
from tba.config.simulated import SimulatedSection
from tba.config.vllm import VLLM_MAX_TEMPERATURE, VllmSection

StopString = Annotated[str, Field(min_length=1, max_length=64)]
TemperatureNumber = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]


class TemperatureMix(StrictModel):
    """Every training rollout draws its own sampling temperature, uniformly (the red-teaming setup of the paper)."""

    low: TemperatureNumber
    """Lowest temperature."""
    high: TemperatureNumber
    """Highest temperature."""

    @model_validator(mode="after")
    def _check(self) -> TemperatureMix:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class TaskSampling(StrictModel):
    """How responses to the prompts of one task end, in training and in evaluations."""

    max_response_tokens: int | None = Field(default=None, ge=1)
    """Length limit; none: `searcher.max_response_tokens`, which is the most that it may be."""
    min_response_tokens: int = Field(default=0, ge=0)
    """With fewer tokens, end of sequence cannot be sampled and stop strings do not count."""
    stop: list[StopString] = Field(default_factory=list, max_length=16)
    """A response ends with the token that completes one of these strings; rewards see the text before the string."""


class SearcherSection(StrictModel):
    """The searchers."""

    num_searchers: int = Field(default=2, ge=0)
    """Searcher processes that `tba run` starts. 0 makes an offline run, which only trains on `run.snapshot`: without
    `samples_per_insert`, and without evaluations."""
    engine: Literal["embedded", "vllm", "simulated"] = "embedded"
    """Generation engine. `embedded`: transformers weights in a static-KV loop with slot refill. `vllm`: vLLM.
    `simulated`: no model at all, for rehearsing a deployment."""
    simulated: SimulatedSection = SimulatedSection()
    """How the simulated engine behaves; other engines do not read it."""
    vllm: VllmSection = VllmSection()
    """What only the vLLM engine reads."""
    num_slots: int = Field(default=64, ge=1)
    """Completions that one engine decodes at once."""
    max_prompt_tokens: int = Field(default=64, ge=1)
    """Longer prompts are refused (counted, reported), never cut."""
    max_response_tokens: int = Field(default=64, ge=1)
    """Length limit of a completion; a task may have a lower one of its own (`searcher.tasks`)."""
    tasks: dict[str, TaskSampling] = Field(default_factory=dict)
    """Per task: lengths and stop strings. Tasks without an entry end at end of sequence or `max_response_tokens`."""
    sampling_temperature: Temperature = Schedule(value=1.0)
    """Temperature of the behaviour policy, not the policy temperature; a number or a schedule."""
    temperature_mix: TemperatureMix | None = None
    """Instead of `sampling_temperature`: each training rollout draws its own from { low, high }."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Training rollouts are drawn from the most probable tokens that hold this probability together; 1 is off. Sampler
    log-probs are those of the restricted distribution. Evaluations always sample without."""
    top_k: int = Field(default=0, ge=0)
    """Training rollouts are drawn from the so many most probable tokens; 0 is off. Goes before `top_p`."""
    torch_num_threads: int = Field(default=1, ge=1)
    """Threads of the engine on CPU."""
    device: str = "cpu"
    """torch device of the engine."""
    push_max_rollouts: int = Field(default=256, ge=1, le=512)
    """Most rollouts in one push."""
    max_unpushed_rollouts: int = Field(default=2048, ge=1)
    """Generation waits (named) when this many finished rollouts wait for scores or for the buffer."""
    engine_timeout_s: float = Field(default=600.0, gt=5)
    """An engine that does not come back from a weight load or from a few steps in this time counts as dead: the
    searcher delivers what is finished and ends with an error, and is started again."""
    drain_s: float = Field(default=20.0, gt=0)
    """After SIGTERM: time to finish, push, and return leases."""
    retry_s: float = Field(default=120.0, gt=0)
    """How long a call to another service is retried before the searcher gives up."""
    score_retry_s: float = Field(default=10.0, gt=0)
    """How long scoring is retried before rollouts are pushed unscored (pending)."""
    when_over: Literal["exit", "wait"] = "exit"
    """When the run is done or has failed: `exit` with code 0, or `wait`, without the model, until a trainer goes on
    with it. `wait` is for Deployments and Compose, which start again whatever ends; `tba run` sets `exit`."""

    @model_validator(mode="after")
    def _check(self) -> SearcherSection:
        if self.temperature_mix is not None and self.sampling_temperature != Schedule(value=1.0):
            raise ValueError(
                "temperature_mix takes the place of sampling_temperature, and both are given; remove one of them"
            )
        mix = self.temperature_mix
        hottest = self.sampling_temperature.highest if mix is None else mix.high
        if self.engine == "vllm" and hottest > VLLM_MAX_TEMPERATURE:
            name = "sampling_temperature" if mix is None else "temperature_mix"
            raise ValueError(
                f"{name} reaches {hottest:g}, and vLLM samples at most at {VLLM_MAX_TEMPERATURE:g}: it would refuse "
                "every prompt; lower it"
            )
        for task, section in self.tasks.items():
            longest = section.max_response_tokens or self.max_response_tokens
            if longest > self.max_response_tokens:
                raise ValueError(
                    f"tasks.{task}.max_response_tokens is {longest}, above max_response_tokens "
                    f"{self.max_response_tokens}, for which engines reserve room; raise that one too"
                )
            if section.min_response_tokens > longest:
                raise ValueError(
                    f"tasks.{task}.min_response_tokens is {section.min_response_tokens}, above the length limit "
                    f"{longest}: no response could end; lower it"
                )
        return self

    @property
    def distortions(self) -> list[str]:
        """The settings that make the behaviour policy another distribution than softmax(logits / temperature)."""
        found = [] if self.temperature_mix is None else ["temperature_mix"]
        found += ["top_p"] if self.top_p < 1 else []
        found += ["top_k"] if self.top_k > 0 else []
        return found + [f"tasks.{name}.min_response_tokens" for name in self.tasks_with_minimum]

    @property
    def tasks_with_minimum(self) -> list[str]:
        """Tasks whose responses have a minimum length."""
        return [name for name, section in self.tasks.items() if section.min_response_tokens]
