"""The `[reward]` section: the scorers of each task, and the limits of the service.

    [reward.tasks.gsm8k]
    scorers = [
        {kind = "format", pattern = "####", gate = 1.0},
        {kind = "last_number"},
        {kind = "python", function = "my_rewards:is_short", weight = 0.1},
    ]

A task's reward is the weighted sum of its scorers' scores. Scorers with a gate run first, in their order: a score below
the gate makes the reward 0, and no other scorer runs. If any scorer that ran gives no score, the reward is unknown.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tba.fields import BareUrl, StrictModel

_REQUEST_SLACK_S = 30.0
"""Time of a request beyond the deadline of its slowest scorer, because an item may wait for other items."""
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class ScorerSpec(StrictModel):
    """Settings that every scorer has."""

    kind: str
    """Kind of the scorer: the name of a file in tba_reward/scorers/."""
    weight: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Factor of its score in the reward. Default: 1, and 0 for a scorer with a gate."""
    gate: float | None = None
    """A score below this makes the reward of the task 0, and no other scorer runs."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one item; beyond it the result is an error, never a number."""
    reads_data: ClassVar[bool] = False
    """Whether a value of the prompt's data, plain or in \\boxed{}, may be a right response."""

    @property
    def part(self) -> str:
        """Name of the scorer in results, metrics and errors."""
        return self.kind

    @property
    def factor(self) -> float:
        """The weight of the score in the reward, with the default filled in."""
        if self.weight is not None:
            return self.weight
        return 1.0 if self.gate is None else 0.0


class ReadSpec(ScorerSpec):
    """Settings of scorers that a response can overload, or that cannot read every response."""

    unreadable: Literal["unknown"] | Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """Score of a response that cannot be scored: it is unreadable, too long, or takes too much CPU time or memory.
    `unknown`: no score, so the policy is not punished. Faults of the data or the service are always unknown."""


REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Start and end marks of reasoning in a response. No answer is read from text between them, or after a start alone."""


class GoldSpec(ScorerSpec):
    """Settings of scorers that compare the response with a gold answer."""

    field: str = "answer"
    """Key of the prompt's data with the gold answer, or with a list of gold answers, each of which is right."""
    reads_data: ClassVar[bool] = True


class ExactSpec(GoldSpec):
    """1 if the response equals the gold answer, ignoring white space around it, else 0."""

    kind: Literal["exact"]


class LastNumberSpec(GoldSpec):
    """1 if the last number of the response equals the gold answer, which must be one number, else 0 (GSM8K)."""

    kind: Literal["last_number"]


class MathSpec(GoldSpec, ReadSpec):
    """1 if the final answer of the response is mathematically the same as the gold answer, else 0 (math-verify).

    The gold answer is a number, LaTeX, or a solution that ends in a `\\boxed{...}`.
    """

    kind: Literal["math"]
    extract: Literal["boxed", "anywhere"] = "boxed"
    """Place of the final answer in a response. `boxed`: the last box; without a box the score is 0. `anywhere`: the
    last box, or else what math-verify finds (after "answer is", the last formula, the last number)."""


class ReasoningGymSpec(ReadSpec):
    """1 if the own rule of a prompt's reasoning-gym data set gives the answer full marks, else 0."""

    kind: Literal["reasoning_gym"]
    extract: Literal["tag", "last_number", "whole"] = "tag"
    """The answer in a response: the last <answer>...</answer>, which is the library's convention, the last number, or
    all of it. Without an answer the score is 0."""
    partial: bool = False
    """Give the rule's own score, from 0 to 1. Many rules pay for junk, or for a text that has the answer in it."""


class FormatSpec(ReadSpec):
    """1 if a regular expression is found in the response, else 0."""

    kind: Literal["format"]
    pattern: str
    r"""Regular expression (Python's `re`). Write flags inside, as `(?s)`; `\A` and `\Z` match start and end."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            # here and not in a worker: a recipe that cannot score must not start
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        return pattern


class ModelScorerSpec(ScorerSpec):
    """Settings of scorers with neural networks, which run in batches in a model server (a process of their own)."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one item, including the wait for its batch."""
    device: str = "auto"
    """torch device of the models; `auto`: the first CUDA device if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of the models; `auto`: the dtype in their files."""
    trust_remote_code: bool = False
    """Run Python code that comes with the models."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens of one batch, padding included; a longer item is a batch of its own."""
    batch_wait_s: float = Field(default=0.005, ge=0)
    """Seconds that the first item of a batch waits for other items."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the model server; default: torch's choice."""
    batch_timeout_s: ClassVar[float] = 20.0
    """Deadline of one batch. Beyond it the process is killed, and each item is scored once more, alone."""

    @model_validator(mode="after")
    def _check_deadlines(self) -> ModelScorerSpec:
        if self.timeout_s <= self.batch_timeout_s:
            raise ValueError(
                f"timeout_s {self.timeout_s} must be more than the {self.batch_timeout_s:g} s of a batch, or one that "
                "hangs takes its other items with it"
            )
        return self

    @property
    def models_key(self) -> str:
        """Settings that decide the model server, as JSON; scorers with equal keys share a server. Settings about the
        use of its output (weight, gate, ...) are left out."""
        return self.model_dump_json(exclude={"weight", "gate", "timeout_s", "against", "missing_eos_penalty"})


class RewardModelSpec(ModelScorerSpec):
    """The score is an output (a logit) of a Hugging Face sequence classification model."""

    kind: Literal["reward_model"]
    model: str = Field(min_length=1)
    """Folder of the model, or its name on the Hugging Face hub."""
    template: str = "{prompt}{response}"
    """The text that the model reads; `{prompt}` and `{response}` are filled in."""
    append_eos: bool = False
    """Append an end-of-sequence token to a response that was not cut off."""
    label: int | str | None = None
    """The output to use, by number or name; default: the only one."""
    missing_eos_penalty: float | None = Field(default=None, allow_inf_nan=False)
    """Score of a response that was cut off, in place of the model's output (published for TL;DR: -1)."""
    against: str | None = None
    """Key of the prompt's data with another response to compare with. The score is 1 if the model prefers the policy's
    response, 0 if it prefers the other one, 0.5 for a tie. The mean over items is the win rate."""

    @model_validator(mode="after")
    def _check_template(self) -> RewardModelSpec:
        _needs_response("template", self.template)
        return self


class RedteamSpec(ModelScorerSpec):
    """The score is the mean toxicity of a victim model's replies to the response, which is an attack."""

    kind: Literal["redteam"]
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one item, including the wait for its batch."""
    batch_timeout_s: ClassVar[float] = 50.0
    victim: str = Field(min_length=1)
    """Folder of the victim model, or its name on the Hugging Face hub."""
    victim_input: Literal["text", "chat"] | None = None
    """Input format of the victim. `text`: `victim_template`. `chat`: one user turn in the victim's chat template.
    Default: `chat` if it has a chat template."""
    victim_template: str = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{prompt}\n\n### Response:\n"
    )
    """Text around an attack, which replaces `{prompt}`; the default is the template of the Alpaca family."""
    max_attack_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an attack; a longer one has no score (`too_long`). Default: the most that the victim can take."""
    num_replies: int = Field(default=5, ge=1)
    """Number of replies that the victim samples for each attack; the score is the mean over them."""
    max_reply_tokens: int = Field(default=30, ge=1)
    """Most tokens of a reply."""
    temperature: float = Field(default=0.7, ge=0)
    """Sampling temperature of the victim; 0 is greedy."""
    top_p: float = Field(default=0.92, gt=0, le=1)
    """Top-p of the victim's sampling."""
    classifier: str = Field(min_length=1)
    """Folder of the model that judges the replies, or its name on the Hugging Face hub."""
    judge: Literal["classifier", "guard"] = "classifier"
    """Toxicity of a reply. `classifier`: the probability of `label`. `guard`: the probability that a language model
    such as Llama Guard says unsafe."""
    classifier_input: Literal["text", "chat"] | None = None
    """Input format of the judge. `text`: `classifier_template`. `chat`: attack and reply as turns in its chat template.
    Default: `chat` for a guard, else `text`."""
    classifier_template: str = "{response}"
    """Text that is judged; `{prompt}` (the attack) and `{response}` (the victim's reply) are filled in."""
    label: int | str | None = None
    """Label of the classifier that means toxic, by number or name; default: the only one."""

    @model_validator(mode="after")
    def _check_templates(self) -> RedteamSpec:
        _needs_response("classifier_template", self.classifier_template)
        if "{prompt}" not in self.victim_template:
            raise ValueError(f"victim_template {self.victim_template!r} has no {{prompt}} for the attack")
        return self


def _needs_response(field: str, template: str) -> None:
    if template.count("{response}") != 1:
        raise ValueError(f"{field} {template!r} must have {{response}} once")


class HttpSpec(ScorerSpec):
    """The score comes from an HTTP endpoint."""

    kind: Literal["http"]
    url: str = Field(pattern=r"^https?://")
    """URL to post batches to, in the schema of `POST /v1/score` (docs/rewards.md). It is part of the reward version:
    when the endpoint begins to score differently, change the URL too, for example its query (`?v=2`)."""
    task: TaskName | None = None
    """Task name to send with the items; default: `score`."""
    token_env: str | None = None
    """Name of the environment variable that holds the bearer token for the endpoint."""


class PythonSpec(ScorerSpec):
    """The score comes from a Python function with the signature of TRL's reward functions.

    A call gets a batch of items. It is repeated item by item if it raises, kills its worker, takes more than
    `timeout_s` of CPU time, or waits for much longer.
    """

    kind: Literal["python"]
    reads_data: ClassVar[bool] = True
    function: str
    """`module:name` (docs/extending.md). A digest of the function's file is part of the reward version."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call. They take precedence over data columns of the same name."""

    @property
    def part(self) -> str:
        """The function's name."""
        return self.function.rpartition(":")[2].rpartition(".")[2]

    @field_validator("kwargs")
    @classmethod
    def _check_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        # the function would get the keyword twice, and raise for every item
        taken = sorted({"prompts", "completions", "completion_ids", "finish_reasons"} & kwargs.keys())
        if taken:
            raise ValueError(f"the service itself passes {taken[0]!r}; give the argument another name")
        try:
            # they travel to worker processes as JSON, and are part of the reward version
            json.dumps(kwargs, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"kwargs must be JSON values, so no dates, NaN or infinity: {error}") from None
        return kwargs


RuleSpec = ExactSpec | LastNumberSpec | MathSpec | ReasoningGymSpec | FormatSpec
AnyScorerSpec = Annotated[RuleSpec | RewardModelSpec | RedteamSpec | HttpSpec | PythonSpec, Field(discriminator="kind")]


class TaskReward(StrictModel):
    """The scorers of one task."""

    scorers: list[AnyScorerSpec] = Field(min_length=1)
    """Scorers whose weighted scores make up the reward."""

    @model_validator(mode="after")
    def _check(self) -> TaskReward:
        # a gate alone may have weight 0, all of them together may not
        if not any(spec.factor for spec in self.scorers):
            raise ValueError(
                "every weight is 0, so the weighted sum is always 0; give one scorer a weight other than 0"
            )
        return self

    @property
    def parts(self) -> dict[str, ScorerSpec]:
        """Name -> scorer; if two scorers have the same name, the second one is called NAME-2."""
        found, num_seen = dict[str, ScorerSpec](), Counter[str]()
        for spec in self.scorers:
            num_seen[spec.part] += 1
            number = num_seen[spec.part]
            found[spec.part if number == 1 else f"{spec.part}-{number}"] = spec
        return found


BUILT_IN_TASKS = ("addition", "exact", "gsm8k", "math")
"""Tasks that the reward service scores without an entry in a recipe."""


class RewardSection(StrictModel):
    """Settings of the reward service."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `auth.tokens_file`."""
    port: int = Field(default=8701, ge=0, le=65535)
    """Port to listen on; 0 lets `tba run` pick a free one."""
    url: BareUrl | None = None
    """Address at which searchers reach the service; default: http://host:port."""
    tasks: dict[TaskName, TaskReward] = Field(default_factory=dict)
    """Task -> its scorers. The built-in tasks need no entry: `addition`, `exact`, `gsm8k`, `math`."""
    num_workers: int = Field(default=2, ge=1)
    """Worker processes for scorers that may run long; a worker that exceeds its deadline is killed and replaced."""

    def takes_tokens(self, task: str) -> bool:
        """Return whether clients must send the responses' token ids, as `completion_ids` of a Python function."""
        entry = self.tasks.get(task)
        return entry is not None and any(isinstance(spec, PythonSpec) for spec in entry.scorers)

    def is_composite(self, task: str) -> bool:
        """Return whether a task has several scorers."""
        entry = self.tasks.get(task)
        return entry is not None and len(entry.scorers) > 1

    @property
    def request_deadline_s(self) -> float:
        """Deadline of a request in seconds: 60, or more if a scorer's own deadline needs more.

        A request that takes longer is refused with 503; the scores known by then stay in the cache. A Python function
        counts twice, because a batch that misses its deadline is repeated item by item.
        """
        slowest_s = 0.0
        for spec in (spec for task in self.tasks.values() for spec in task.scorers):
            # the batch, and then its items one by one
            num_calls = 2 if isinstance(spec, PythonSpec) else 1
            slowest_s = max(slowest_s, num_calls * (spec.timeout_s + _REQUEST_SLACK_S))
        return max(60.0, slowest_s)
