"""The `[reward]` section: the scorers of each task, and the limits of the service.

    [reward.tasks.gsm8k]
    scorers = [
        {kind = "format", pattern = "####", gate = 1.0},
        {kind = "last_number"},
        {kind = "python", function = "my_rewards:is_short", weight = 0.1},
    ]

A task's reward is the weighted sum of its scorers' scores. Gates are scored first, in their order: a score below the
gate makes the reward 0, and no other scorer is asked. If any requested score is unknown, so is the reward.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tba.fields import BareUrl, StrictModel

_REQUEST_SLACK_S = 30.0
"""Beyond the deadline of its slowest scorer: other items of the request may come before."""
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class ScorerSpec(StrictModel):
    """The settings of every scorer of a task."""

    kind: str
    """Kind of the scorer: the name of a file in tba_reward/scorers/."""
    weight: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Factor of its score in the sum. Default: 1, and 0 for a gate."""
    gate: float | None = None
    """A score below this makes the reward of the task 0; nothing else is asked then."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one item; beyond it the result is an error, never a number."""
    reads_data: ClassVar[bool] = False
    """Whether a value of the prompt's data, bare or in a box, may be a right response."""

    @property
    def part(self) -> str:
        """The name of this part of the reward in results, metrics and errors."""
        return self.kind

    @property
    def factor(self) -> float:
        """The weight in the sum."""
        if self.weight is not None:
            return self.weight
        return 1.0 if self.gate is None else 0.0


class ReadSpec(ScorerSpec):
    """The settings of scorers whose work a response can make endless or impossible."""

    unreadable: Literal["unknown"] | Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """The score if the response itself cannot be scored: it is unreadable, too long, or takes too much CPU time or
    memory. `unknown`: no score, which costs a policy nothing. Faults of the data or the service are always unknown."""


REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""The delimiters of reasoning in a response; text between them, even without an end, holds no answer."""


class GoldSpec(ScorerSpec):
    """The settings of scorers that compare the response with a gold answer."""

    field: str = "answer"
    """Where the prompt's data has the gold answer, or a list of gold answers, each of them right."""
    reads_data: ClassVar[bool] = True


class ExactSpec(GoldSpec):
    """1 if the response is the gold answer, but for white space around it, else 0."""

    kind: Literal["exact"]


class LastNumberSpec(GoldSpec):
    """1 if the last number of the response is the gold answer, which is one number, else 0 (GSM8K)."""

    kind: Literal["last_number"]


class MathSpec(GoldSpec, ReadSpec):
    """1 if the final answer of the response is mathematically the same as the gold answer, else 0 (math-verify).

    The gold answer is a number, LaTeX, or a solution that ends in a `\\boxed{...}`.
    """

    kind: Literal["math"]
    extract: Literal["boxed", "anywhere"] = "boxed"
    """Where the answer of a response is looked for. `boxed`: the last box; without one the score is 0. `anywhere`:
    without a box, where math-verify finds one (after "answer is", the last formula, the last number)."""


class FormatSpec(ReadSpec):
    """1 if a regular expression is found in the response, else 0."""

    kind: Literal["format"]
    pattern: str
    r"""Regular expression (Python's `re`). Flags go inside, `(?s)`; `\A` and `\Z` stand for both ends."""

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
    """The settings of every scorer with neural networks, which run in their own process, in batches."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one item, waiting for its batch included."""
    device: str = "auto"
    """Device of the models; `auto`: the first CUDA device if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Number format of the models; `auto`: that of their files."""
    trust_remote_code: bool = False
    """Whether Python code in the models' folders is run."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens of one batch, padding included; a longer item is a batch of its own."""
    batch_wait_s: float = Field(default=0.005, ge=0)
    """How long the first item of a batch waits for others."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the process on the CPU; default: torch's choice."""
    batch_timeout_s: ClassVar[float] = 20.0
    """Deadline of one batch; beyond it the process is killed, and each of its items is asked once more, alone."""

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
        """Equal for two scorers that share a process: what is done with an output needs no other one."""
        return self.model_dump_json(exclude={"weight", "gate", "timeout_s", "against", "missing_eos_penalty"})


class RewardModelSpec(ModelScorerSpec):
    """An output of a Hugging Face sequence classification model, as it is (a logit)."""

    kind: Literal["reward_model"]
    model: str = Field(min_length=1)
    """Folder of the model, or its name on the Hugging Face hub."""
    template: str = "{prompt}{response}"
    """The text that the model reads; `{prompt}` and `{response}` are filled in."""
    append_eos: bool = False
    """Whether an end-of-sequence token ends the tokens of a response that is not cut off."""
    label: int | str | None = None
    """The output that counts, by number or name; default: the only one."""
    missing_eos_penalty: float | None = Field(default=None, allow_inf_nan=False)
    """The score of a response that was cut off, instead of the model's (published for TL;DR: -1)."""
    against: str | None = None
    """Field of the prompt's data with another response: the score is then 1 where the model prefers the response to
    it, 0 where it prefers the other one, 0.5 for a tie. The mean over items is the win rate."""

    @model_validator(mode="after")
    def _check_template(self) -> RewardModelSpec:
        _needs_response("template", self.template)
        return self


class RedteamSpec(ModelScorerSpec):
    """How toxic the replies of a victim model to the response are, on average."""

    kind: Literal["redteam"]
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one item, waiting for its batch included."""
    batch_timeout_s: ClassVar[float] = 50.0
    victim: str = Field(min_length=1)
    """Folder of the victim model, or its name on the Hugging Face hub."""
    victim_input: Literal["text", "chat"] | None = None
    """The input of the victim: `victim_template`, or one turn in its chat template. Default: chat where it has one."""
    victim_template: str = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{prompt}\n\n### Response:\n"
    )
    """The text around an attack, `{prompt}`; the default is that of the Alpaca family."""
    max_attack_tokens: int | None = Field(default=None, ge=1)
    """Longest attack, in tokens of the victim; a longer one has no score (`too_long`). Default: what the victim can
    take."""
    num_replies: int = Field(default=5, ge=1)
    """Replies of the victim to each attack; the score is the mean over them."""
    max_reply_tokens: int = Field(default=30, ge=1)
    """Longest reply."""
    temperature: float = Field(default=0.7, ge=0)
    """Sampling temperature of the victim; 0 is greedy."""
    top_p: float = Field(default=0.92, gt=0, le=1)
    """Share of the probability that the victim samples from."""
    classifier: str = Field(min_length=1)
    """Folder of the model that judges the replies, or its name on the Hugging Face hub."""
    judge: Literal["classifier", "guard"] = "classifier"
    """`classifier`: probability of `label`. `guard`: a language model (Llama Guard): that of its unsafe verdict."""
    classifier_input: Literal["text", "chat"] | None = None
    """The input of the classifier: `classifier_template`, or attack and reply as turns in its chat template. Default:
    chat for a guard, else text."""
    classifier_template: str = "{response}"
    """The text that is judged; `{prompt}` (the attack) and `{response}` (the victim's reply) are filled in."""
    label: int | str | None = None
    """The label of the classifier that means toxic, by number or name; default: the only one."""

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
    """The score that an HTTP endpoint gives."""

    kind: Literal["http"]
    url: str = Field(pattern=r"^https?://")
    """Where batches are posted; docs/rewards.md has the schema, which is that of `POST /v1/score`. It is part of
    the reward version: when the endpoint changes its scores, change a query (`?v=2`)."""
    task: TaskName | None = None
    """The task name that is sent with the items; default: `score`."""
    token_env: str | None = None
    """Environment variable with the bearer token that is sent."""


class PythonSpec(ScorerSpec):
    """The score that a Python function gives (the signature of TRL's reward functions).

    `timeout_s` is the CPU time that a call may take. One that takes more, waits for much longer, kills its
    worker, or raises is repeated item by item.
    """

    kind: Literal["python"]
    reads_data: ClassVar[bool] = True
    function: str
    """`module:name` (docs/extending.md). The reward version has a digest of its file."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments that every call gets by these names, as they are; a column of the same name is not passed on."""

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


AnyScorerSpec = Annotated[
    ExactSpec | LastNumberSpec | MathSpec | FormatSpec | RewardModelSpec | RedteamSpec | HttpSpec | PythonSpec,
    Field(discriminator="kind"),
]


class TaskReward(StrictModel):
    """How one task is scored."""

    scorers: list[AnyScorerSpec] = Field(min_length=1)
    """The parts of the reward."""

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
        """The scorers by the name of their part of the reward; of two with one name the second is NAME-2."""
        found, num_seen = dict[str, ScorerSpec](), Counter[str]()
        for spec in self.scorers:
            num_seen[spec.part] += 1
            number = num_seen[spec.part]
            found[spec.part if number == 1 else f"{spec.part}-{number}"] = spec
        return found


BUILT_IN_TASKS = ("addition", "exact", "gsm8k", "math")
"""Tasks that the reward service scores without an entry in a recipe."""


class RewardSection(StrictModel):
    """The reward service."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `auth.tokens_file`."""
    port: int = Field(default=8701, ge=0, le=65535)
    """Port to listen on; 0 lets `tba run` pick a free one."""
    url: BareUrl | None = None
    """Where searchers find the service; default: http://host:port."""
    tasks: dict[TaskName, TaskReward] = Field(default_factory=dict)
    """How tasks are scored. Those of BUILT_IN_TASKS need no entry: `addition`, `exact`, `gsm8k`, `math`."""
    num_workers: int = Field(default=2, ge=1)
    """Worker processes for rules whose time is not bounded; one that runs over its deadline is killed and replaced."""

    def takes_tokens(self, task: str) -> bool:
        """Return whether clients send the token ids of responses of this task, for the `completion_ids` of a
        function."""
        entry = self.tasks.get(task)
        return entry is not None and any(isinstance(spec, PythonSpec) for spec in entry.scorers)

    def is_composite(self, task: str) -> bool:
        """Return whether the reward of this task is made of several scores."""
        entry = self.tasks.get(task)
        return entry is not None and len(entry.scorers) > 1

    @property
    def request_deadline_s(self) -> float:
        """Deadline of a request: 60, and more where a scorer's own deadline is longer, which it never cuts short.

        A request that takes longer is refused (503), and what was done by then is in the cache. A batch of a Python
        function that is not through by its deadline is repeated item by item, which takes as long again at most where
        one item is to blame.
        """
        slowest_s = 0.0
        for spec in (spec for task in self.tasks.values() for spec in task.scorers):
            # the batch, and then its items one by one
            num_calls = 2 if isinstance(spec, PythonSpec) else 1
            slowest_s = max(slowest_s, num_calls * (spec.timeout_s + _REQUEST_SLACK_S))
        return max(60.0, slowest_s)
