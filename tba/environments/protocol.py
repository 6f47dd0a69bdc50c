"""What an environment is asked, and what it answers.

    reset(seed, data)  -> messages, tools                     the policy replies to the messages
    step(reply)        -> messages, reward, done, info        until done, or a limit of the recipe
    close()

Or an agent, which asks for the replies itself:

    play(seed, data, policy)  -> reward                       calls an address with a secret, as often as it likes

Messages are in the format of OpenAI: {"role", "content"}; a plain text is a message of the user. `data` is the data of
the prompt. With equal seeds, data and replies an environment should answer equally: off-policy TB is exact only then.

Its methods may be plain functions too; these run in threads. An exception is a failure of the environment: the whole
episode is played again, and nothing trains on it. `EpisodeError` names another boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from tba.errors import TbaError
from tba.fields import Boundary, ParseStatus

Stage = Literal["reset", "generate", "step", "render", "score"]
Message = Mapping[str, Any]


class EpisodeError(TbaError, RuntimeError):
    """An episode cannot go on, and the policy is not to blame."""

    slug = "episode"

    def __init__(self, detail: str, *, boundary: Boundary = "environment") -> None:
        super().__init__(detail)
        self.boundary: Boundary = boundary


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call that a reply tried to make. Only a call with the status `ok` may be executed."""

    raw: str
    """The text between the marks of the call."""
    status: ParseStatus
    name: str | None = None
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the policy, parsed."""

    content: str
    reasoning: str | None
    """Text between the marks of thinking; None without them."""
    tool_calls: tuple[ToolCall, ...]

    @property
    def parse_status(self) -> ParseStatus | None:
        """The status of the first call that failed, else `ok`; None without calls."""
        for call in self.tool_calls:
            if call.status != "ok":
                return call.status
        return "ok" if self.tool_calls else None


class Reset(NamedTuple):
    """The beginning of an episode; a plain tuple is taken too."""

    messages: Sequence[Message | str] = ()
    """Behind the messages of the prompt. None at all: the prompt is a text, and that is the message of the user."""
    tools: Sequence[Any] = ()
    """Functions, which are called for the policy; or JSON schemas of tools, whose calls `step` answers itself."""


class Step(NamedTuple):
    """The answer to a reply; a plain tuple is taken too."""

    messages: Sequence[Message | str] = ()
    reward: float | None = None
    """What this turn pays; the reward of an episode is the sum. None: nothing is known yet, which is not 0."""
    done: bool = False
    info: Mapping[str, Any] = {}
    """`stop_condition`: a name for what ended it. `truncated`: whether that was a limit of the environment's own."""


@runtime_checkable
class Environment(Protocol):
    """One object plays one episode."""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Begin the episode."""
        ...

    async def step(self, reply: Reply) -> Step:
        """Answer a reply of the policy."""
        ...

    async def close(self) -> None:
        """Free what the episode holds; called once, whatever happened."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Where an agent asks for replies (docs/environments.md has the routes)."""

    url: str
    secret: str
    """Of this episode."""
    tokenizer: str
    """Folder of the model's tokenizer files, for agents that render messages themselves."""


class Outcome(NamedTuple):
    """The end of an agent's play; a plain tuple is taken too."""

    reward: float | None
    """None: nothing is known, which is not 0."""
    session: str = ""
    """The `X-Session-ID` of the conversation that is stored; an agent may have others, such as those of other seats."""
    stop_condition: str = "done"
    truncated: bool = False


@runtime_checkable
class Agent(Protocol):
    """Plays an episode from its beginning to its end; one object plays one episode."""

    async def play(self, seed: int, data: Mapping[str, Any], policy: Policy) -> Outcome:
        """Play the episode."""
        ...

    async def close(self) -> None:
        """Free what the episode holds; called once, whatever happened."""
        ...
