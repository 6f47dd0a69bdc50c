"""Prompts, their upload, and leases on visits and evaluation units."""

from __future__ import annotations

import json
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from tba.fields import MAX_DIGITS, Integer, Name, Number, RunState, Split, StrictModel, VersionText
from tba.wire.codec import new_id
from tba.wire.sequences import MAX_ENVIRONMENT_SEED, MAX_SEAT

MAX_DATA_LEVELS = 32
"""Most levels of nesting in a prompt's data, well below the limits of the JSON parsers that read it."""
_MAX_WHOLE = 10**MAX_DIGITS
_OF_CHATS = {"messages", "tools", "chat_template_kwargs"}
T = TypeVar("T")


def _plain_json(data: T) -> T:
    level: list[Any] = [data]  # level by level: recursion would let deep data exhaust the stack
    for _ in range(MAX_DATA_LEVELS):
        if not level:  # nearly always after two levels, and every prompt of a start comes here
            break
        children = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
        if any(isinstance(child, int) and not -_MAX_WHOLE < child < _MAX_WHOLE for child in children):
            raise ValueError(f"holds a whole number of more than {MAX_DIGITS} digits; store it as a text")
        level = [child for child in children if isinstance(child, (dict, list))]
    if level:
        raise ValueError(f"nested deeper than {MAX_DATA_LEVELS} levels; flatten it, or store it as one text")
    json.dumps(data, allow_nan=False, ensure_ascii=False).encode()  # NaN and lone surrogates raise ValueError
    return data


PromptData = Annotated[dict[str, Any], AfterValidator(_plain_json)]
"""Data for the scorers of a prompt, such as the gold answer: JSON, nested at most 32 levels deep."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES_CHARS = 1_000_000


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the format of OpenAI unchanged; raise ValueError for others."""
    for number, message in enumerate(messages, start=1):
        # a template writes a role as it is: another text could write whole turns
        if message.get("role") not in ROLES:
            raise ValueError(f"message {number} has role {message.get('role')!r:.60}, not one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            raise ValueError(f"message {number} ({message['role']}): its content is not text; give it one")
    return _bounded(_plain_json(messages))


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {number} has no function with a name")
    return _bounded(_plain_json(tools))


def _bounded(value: T) -> T:
    if (num_chars := len(json.dumps(value, ensure_ascii=False))) > MAX_MESSAGES_CHARS:
        raise ValueError(f"has {num_chars} characters as JSON, more than {MAX_MESSAGES_CHARS}")
    return value


PromptMessages = Annotated[list[dict[str, Any]], Field(min_length=1), AfterValidator(checked_messages)]
"""Messages in the format of OpenAI: `role` and `content` (text), and for some `tool_calls`, `name`, `tool_call_id`."""
PromptTools = Annotated[list[dict[str, Any]], AfterValidator(_tools)]
"""JSON schemas of functions: {"type": "function", "function": {"name", "description", "parameters"}}."""


class Prompt(StrictModel):
    """One question with its task name and the data its reward needs.

    With `messages`, searchers encode these by the chat template of their model, and special tokens inside contents
    stay text. `text` is then the rendered chat, which people read and scorers get.
    """

    prompt_id: Name
    task: Name
    text: str = Field(min_length=1, max_length=1_000_000)
    messages: PromptMessages | None = None
    tools: PromptTools = Field(default_factory=list)
    chat_template_kwargs: PromptData = Field(default_factory=dict)
    data: PromptData = Field(default_factory=dict)
    split: Split = "train"

    @model_validator(mode="after")
    def _check(self) -> Prompt:
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs are for messages; give these, or leave them out")
        return self

    def document(self) -> dict[str, Any]:
        """Return the prompt as JSON, without the fields of a chat where it has none."""
        return self.model_dump(mode="json", exclude=None if self.messages is not None else _OF_CHATS)

    @property
    def environment_seed(self) -> int:
        """The seed of the environment in every episode of this prompt: `seed` of its data, else made from its id."""
        # not drawn per episode: off-policy TB is exact where answers are a function of the seed and the replies
        seed = self.data.get("seed")
        if type(seed) is int and 0 <= seed <= MAX_ENVIRONMENT_SEED:
            return seed
        return int.from_bytes(blake2b(self.prompt_id.encode(), digest_size=6).digest(), "little")

    @property
    def environment_seat(self) -> int:
        """The seat that the rollouts of this prompt play: `seat` of its data, else 0."""
        seat = self.data.get("seat")
        return seat if type(seat) is int and 0 <= seat <= MAX_SEAT else 0


class PromptUpload(StrictModel):
    """POST /v1/prompts: store prompts. If a known id comes with other content, the whole upload is refused."""

    prompts: list[Prompt] = Field(min_length=1, max_length=10_000)


class PromptUploadReply(StrictModel):
    """Reply to an upload: how many of its prompts were new or known, and how many prompts each split has now."""

    num_new: int
    num_same: int
    num_train: int
    num_heldout: int


PromptOrder = Literal["upload", "best", "worst", "most"]
"""`upload`: in order of upload. `best`, `worst`: by mean reward of the stored rollouts. `most`: by their number."""


class PromptInfo(StrictModel):
    """One prompt, with numbers about its stored rollouts."""

    prompt_id: str
    task: str
    split: Split
    text: str
    text_cut: bool
    """Whether `text` is only the beginning of the prompt's text."""
    data: dict[str, Any] | None
    """Data for the scorer, such as the gold answer; None: its JSON is longer than the `text_chars` of the request."""
    num_rollouts: int
    num_scored: int
    reward_mean: float | None
    """Mean reward of the scored rollouts; `reward_*` are None if there are none."""
    reward_min: float | None
    reward_max: float | None


class PromptPage(StrictModel):
    """GET /v1/prompts. Send `next` as `after` to get the next page; it is None at the end."""

    prompts: list[PromptInfo]
    next: int | None
    num_matching: int
    """Number of prompts on all pages together."""


class PromptVersion(StrictModel):
    """Numbers about the stored rollouts of a prompt that one policy version generated."""

    version: VersionText
    num_rollouts: int
    num_scored: int
    reward_mean: float | None


class PromptDetail(PromptInfo):
    """GET /v1/prompts/{prompt_id}: one prompt with its whole text, and its rollouts by policy version, oldest first."""

    by_version: list[PromptVersion]


MAX_LEASE_IDS = 4096
"""Most leases in one LeaseReturn or LeaseRenewal."""
MAX_REFUSED_VERSIONS = 64


class LeaseRequest(StrictModel):
    """POST /v1/leases: claim up to `max_leases` visits or evaluation units, but no evaluation of `refused_versions`.

    A retry (the same `searcher_id` and `request_id`) gets the leases of the first request that are still open. Without
    that, nobody would work on the leases of a lost reply until they expire.

    With `wait_s`, the buffer holds the request for at most that many seconds. It answers as soon as it can grant
    `min_leases` visits or an evaluation, has a version other than `known_version`, or the run ends. The reply may then
    hold fewer leases, or none. The buffer holds only a few requests at a time, and answers further ones at once.
    """

    searcher_id: Name
    max_leases: Integer = Field(ge=1, le=1024)
    min_leases: Integer = Field(default=1, ge=1, le=1024)
    wait_s: Number = Field(default=0.0, ge=0, le=60)
    known_version: VersionText | None = None
    request_id: Name = Field(default_factory=partial(new_id, "request"))
    version: VersionText | None = None
    refused_versions: list[VersionText] = Field(default_factory=list, max_length=MAX_REFUSED_VERSIONS)


class Lease(StrictModel):
    """A claim on one visit of one prompt, or on one prompt of an evaluation.

    `train`: sample `num_rollouts` completions with the newest weights and push them under `visit_id`.
    `sample`, `greedy`: generate for evaluation `eval_id` with exactly `version`; post them to /v1/evals/{id}/results.
    `temperature` is the current sampling temperature (train), the policy temperature (sample), or 0 (greedy).
    """

    lease_id: str
    kind: Literal["train", "sample", "greedy"]
    visit_id: str
    prompt: Prompt
    num_rollouts: int
    temperature: float
    expires_in_s: float
    eval_id: str | None = None
    version: VersionText | None = None


class LeaseReply(StrictModel):
    """Reply to a lease request. If `leases` is empty, `wait` names the wait, and `retry_after_s` says when to retry."""

    leases: list[Lease]
    latest_version: VersionText | None
    """The version that searchers sample with: the newest one, or with `sampling.lag_steps` an older one."""
    run_state: RunState
    wait: str | None = None
    retry_after_s: float = 0.0


class LeaseReturn(StrictModel):
    """POST /v1/leases/return: return unfinished leases. Visits of `refused_lease_ids` end: they cannot be completed."""

    searcher_id: Name
    lease_ids: list[Name] = Field(max_length=MAX_LEASE_IDS)
    refused_lease_ids: list[Name] = Field(default_factory=list, max_length=MAX_LEASE_IDS)


class LeaseRenewal(StrictModel):
    """POST /v1/leases/renew: extend leases that the searcher still works on, to `buffer.lease_s` from now."""

    searcher_id: Name
    lease_ids: list[Name] = Field(max_length=MAX_LEASE_IDS)


class LeaseRenewalReply(StrictModel):
    """Reply to a renewal: the leases that the searcher has lost (fulfilled, ended, or held by another searcher now)."""

    lost_lease_ids: list[str]
