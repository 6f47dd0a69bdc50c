"""The searchers: their engines, how they sample, their deadlines, and how their number is scaled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from tba import plugins
from tba.config.schedules import Temperature
from tba.errors import ConfigError, pip_install
from tba.fields import BareUrl, StrictModel
from tba.tls import is_loopback

VLLM_MIN_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this."""
VLLM_MAX_TEMPERATURE = 2.0
"""vLLM refuses requests with a higher temperature."""


VLLM_RELEASES = ("0.32.0",)
"""Releases of vLLM that pass the contract tests of the engines; the services' extras pin the first of them. Other
releases may change functions that the engine calls (docs/searcher.md)."""


def check_vllm_release(version: str) -> None:
    """Raise ConfigError for a version of vLLM that is not in VLLM_RELEASES."""
    # without what follows (+cu130, .post1); a build from before a release (rc1, .dev3) lacks some of it
    release = re.fullmatch(r"(\d+\.\d+\.\d+)(\.post\d+)?(\+.*)?", version)
    if release is None or release[1] not in VLLM_RELEASES:
        raise ConfigError(
            f"vLLM {version or 'of an unknown version'} is installed, and this release of tba was tried with "
            f"{' and '.join(VLLM_RELEASES)} only, since releases of vLLM change what it calls; "
            f"{pip_install(f'vllm=={VLLM_RELEASES[0]}')}"
        )


class SearcherVllmSection(StrictModel):
    """vLLM in the process of a searcher; `searcher.num_slots` is the number of sequences in a batch."""

    gpu_memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that vLLM may use for weights, KV cache and work space. With too little, vLLM preempts
    sequences and computes them again."""
    quantization: Literal["fp8_per_channel", "fp8_per_block"] | None = None
    """Round the weights of linear layers to 8 bits when they are loaded, and at each update. That takes half the
    memory, and moves log-probs further from the trainer's (docs/searcher.md). None: keep the published weights."""


class OpenAiSection(StrictModel):
    """A vLLM server that generates for one searcher and has routes for weight updates (docs/searcher.md). Set
    TBA_SEARCHER__OPENAI__URL in a searcher's environment to give it a server of its own."""

    url: BareUrl | None = Field(default=None, pattern=r"^https?://")
    """Address of the server, without /v1. Certificates of https are checked against `tls.ca_file`."""
    token_env: str | None = None
    """Name of the environment variable that holds the bearer token for the server (vLLM's VLLM_API_KEY)."""
    weights_folder: str | None = None
    """Folder into which the searcher writes the files of each version, and from which the server loads them; both must
    have access. None: a temporary folder, for a server of the same user on the same machine."""
    weights_folder_at_server: str | None = None
    """Path of `weights_folder` on the server; none: the same path."""

    @model_validator(mode="after")
    def _check(self) -> OpenAiSection:
        if self.weights_folder_at_server is not None and self.weights_folder is None:
            raise ValueError("weights_folder_at_server says where the server has weights_folder; give that one too")
        return self

    @property
    def is_beside(self) -> bool:
        """Whether the server's address is loopback: it runs on the machine, or in the pod, of the searcher."""
        return is_loopback(urlsplit(self.url or "").hostname or "")


class ScalingSection(StrictModel):
    """How `PATCH /v1/run/searchers` (`tba scale`) starts and stops searchers."""

    backend: Literal["none", "local", "kubernetes"] = "none"
    """`none`: tba does not start or stop searchers, and refuses requests to scale with advice. `local`: `tba run` does,
    and sets this value itself. `kubernetes`: the buffer service sets the replicas of one Deployment
    (extra `kubernetes`)."""
    deployment: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
    """Name of the Deployment of the searchers."""
    num_searchers: int | None = Field(default=None, ge=1, le=100_000)
    """With `kubernetes`: number of searchers until an operator asks for another one. The Deployment itself must not set
    `spec.replicas`, because two writers would fight over it. None: `searcher.num_searchers`."""
    max_searchers: int = Field(default=64, ge=1, le=100_000)
    """Most searchers that a request may ask for, so that a typing error does not rent a cluster."""
    scale_down_on_run_end: bool = True
    """Set the Deployment to 0 replicas when the run is done or has failed, which frees the GPUs. A trainer that
    continues the run brings the searchers back."""

    @model_validator(mode="after")
    def _check(self) -> ScalingSection:
        if self.backend == "kubernetes" and self.deployment is None:
            raise ValueError(
                'backend = "kubernetes" needs the name of the Deployment of the searchers; give scaling.deployment'
            )
        if self.num_searchers is not None and self.num_searchers > self.max_searchers:
            raise ValueError(
                f"num_searchers is {self.num_searchers}, above max_searchers {self.max_searchers}; raise that one too"
            )
        return self


StopString = Annotated[str, Field(min_length=1, max_length=64)]


class TemperatureMix(StrictModel):
    """Draw the temperature of every training rollout uniformly from `low` to `high` (the paper's red-teaming)."""

    low: Temperature
    """The lowest temperature."""
    high: Temperature
    """The highest temperature."""

    @model_validator(mode="after")
    def _check(self) -> TemperatureMix:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class TaskSampling(StrictModel):
    """Rules for where responses to the prompts of one task end, in training and in evaluations."""

    min_response_tokens: int = Field(default=0, ge=0)
    """Until a response has this many tokens, end of sequence cannot be sampled, and stop strings are ignored."""
    stop: list[StopString] = Field(default_factory=list, max_length=16)
    """A response ends with the token that completes one of these strings; rewards see the text before the string."""


MAX_TENSOR_PARALLEL = 8
"""GPUs of one machine: every layer exchanges data between the GPUs, and networks are too slow for that."""


def check_tensor_parallel(config: Mapping[str, Any], size: int) -> None:
    """Check that the tensors of a model can be split into `size` equal slices, one per rank; else raise ConfigError.

    Args:
        config: the model's `config.json`; sizes that it does not name are not checked.
    """

    def number(*names: str) -> int:
        # some models have one number per layer
        return next((value for name in names if isinstance(value := config.get(name), int) and value), 0)

    heads = number("num_attention_heads", "n_head")
    sizes = {
        "attention heads": heads,
        "key-value heads": number("num_key_value_heads") or heads,
        "inner values of its MLP": number("intermediate_size", "n_inner"),
        "inner values of an expert": number("moe_intermediate_size"),
    }
    for what, value in sizes.items():
        # with fewer key-value heads than ranks, several ranks hold the same one
        is_shared = what == "key-value heads" and 0 < value < size
        if size % value if is_shared else value % size:
            raise ConfigError(
                f"searcher.tensor_parallel_size is {size}, and {size} ranks cannot share the {value} {what} of the "
                "model equally; give a divisor"
            )


ENGINES = ("embedded", "vllm", "openai", "simulated")
"""The built-in names of `searcher.engine`."""
VLLM_ENGINES = ("vllm", "openai")
"""The built-in engines in which vLLM samples."""
Engine = Annotated[
    str,
    AfterValidator(partial(plugins.check_name, what="engine", builtin=ENGINES)),
    Field(json_schema_extra={"examples": [*ENGINES]}),
]


class SearcherSection(StrictModel):
    """Settings of the searchers."""

    num_searchers: int = Field(default=2, ge=0)
    """Number of searcher processes that `tba run` starts; unset, it chooses by the machine (docs/recipes.md). 0: an
    offline run, which only trains on `run.snapshot`, without `samples_per_insert` and without evaluations."""
    engine: Engine = "embedded"
    """Generation engine. `embedded`: transformers weights, decoded over a static KV cache with slot refill. `vllm`:
    vLLM. `openai`: a vLLM server that runs already. `simulated`: no model, to rehearse a deployment. Or an engine of
    your own: MODULE:NAME (docs/extending.md)."""
    vllm: SearcherVllmSection = SearcherVllmSection()
    """Settings of the engine `vllm` only."""
    openai: OpenAiSection = OpenAiSection()
    """Settings of the engine `openai` only."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=MAX_TENSOR_PARALLEL)
    """Number of GPUs of one searcher with the engine `vllm`, each with a slice of every tensor, for models too large
    for one GPU. Otherwise one searcher per GPU generates more. On the CPU: number of processes."""
    num_slots: int = Field(default=64, ge=1)
    """Number of completions that one engine decodes at once; unset, `tba run` chooses by the machine."""
    max_prompt_tokens: int = Field(default=64, ge=1)
    """Longer prompts are refused (counted, reported), never cut."""
    max_response_tokens: int = Field(default=64, ge=1)
    """Length limit of a completion."""
    tasks: dict[str, TaskSampling] = Field(default_factory=dict)
    """Task -> minimum length and stop strings. In other tasks, a response ends at end of sequence or at
    `max_response_tokens`."""
    sampling_temperature: Temperature = 1.0
    """Temperature of the behaviour policy; default: `model.policy_temperature`."""
    temperature_mix: TemperatureMix | None = None
    """Range { low, high } from which each training rollout draws its temperature, instead of `sampling_temperature`."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample training rollouts from the most probable tokens that together have this probability; 1 is off. Sampler
    log-probs are those of the restricted distribution. Evaluations never use it."""
    top_k: int = Field(default=0, ge=0)
    """Sample training rollouts from this many most probable tokens; 0 is off. Applied before `top_p`."""
    device: str = "cpu"
    """torch device of the engine."""
    drain_s: float = Field(default=20.0, gt=0)
    """Seconds after SIGTERM to finish completions, push them, and return leases."""
    on_run_end: Literal["exit", "wait"] = "exit"
    """When the run is done or has failed: `exit` with code 0, or unload the model and `wait` until a trainer continues
    the run. `wait` is for Deployments and Compose, which restart a process that ends; `tba run` sets `exit`."""

    @model_validator(mode="after")
    def _check(self) -> SearcherSection:
        if self.tensor_parallel_size > 1 and self.engine != "vllm":
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, and engine is {self.engine!r}: only vllm splits "
                "a model over several GPUs; set tensor_parallel_size to 1 or engine to vllm"
            )
        if self.engine == "openai" and self.openai.url is None and self.num_searchers != 0:  # offline nothing asks it
            raise ValueError('engine = "openai" needs the address of a server; give openai.url')
        if self.temperature_mix is not None and self.sampling_temperature != 1.0:
            raise ValueError(
                "temperature_mix takes the place of sampling_temperature, and both are given; remove one of them"
            )
        mix = self.temperature_mix
        # vLLM refuses single requests, so that without this check every visit would be refused and nobody would know
        # why
        hottest = self.sampling_temperature if mix is None else mix.high
        if self.engine in VLLM_ENGINES and hottest > VLLM_MAX_TEMPERATURE:
            name = "sampling_temperature" if mix is None else "temperature_mix"
            raise ValueError(
                f"{name} reaches {hottest:g}, and vLLM samples at most at {VLLM_MAX_TEMPERATURE:g}: it would refuse "
                f"every prompt; lower {name}"
            )
        for task, section in self.tasks.items():
            if section.min_response_tokens > self.max_response_tokens:
                raise ValueError(
                    f"tasks.{task}.min_response_tokens is {section.min_response_tokens}, above max_response_tokens "
                    f"{self.max_response_tokens}: no response could end; lower min_response_tokens"
                )
        return self

    @property
    def distortions(self) -> list[str]:
        """Names of the settings by which the behaviour policy differs from softmax(logits / temperature)."""
        # an objective that takes the behaviour policy for an earlier theta is biased by any of these
        found = [] if self.temperature_mix is None else ["temperature_mix"]
        found += ["top_p"] if self.top_p < 1 else []
        found += ["top_k"] if self.top_k > 0 else []
        return found + [f"tasks.{name}.min_response_tokens" for name in self.tasks_with_minimum]

    @property
    def tasks_with_minimum(self) -> list[str]:
        """Names of the tasks whose responses have a minimum length."""
        return [name for name, section in self.tasks.items() if section.min_response_tokens]
