"""Tools and their schemas, one episode in a process, and an environment behind HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
import uvicorn
from pydantic import Field

from tba.config.environments import EnvironmentSection
from tba.environments import EpisodeError, Play, Reply, Reset, Step, ToolCall, open_play, tool_of
from tba.environments.server import app_of
from tba.errors import ConfigError
from tests.support.environments import Echo, add, away
from tests.support.waits import until


def say(content: str, *calls: ToolCall) -> Reply:
    return Reply(content, None, calls)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("", "ok", name, arguments)


def test_a_schema_comes_from_signature_and_docstring():
    def search(
        text: str,
        limit: Annotated[int, Field(description="how many", ge=1)] = 3,
        where: Literal["title", "body"] = "body",
        tags: list[str] | None = None,
    ) -> list[str]:
        """Search the corpus
        for a text.

        Args:
            text (str): what to look for,
                in any case.
            where: the part.

        Returns:
            text: nothing that describes an argument.
        """
        return [text, where, *(tags or [])][:limit]

    schema = tool_of(search).schema["function"]
    assert schema["name"] == "search"
    assert schema["description"] == "Search the corpus for a text."
    properties = schema["parameters"]["properties"]
    assert properties["text"] == {"type": "string", "description": "what to look for, in any case."}
    assert properties["limit"] == {"type": "integer", "default": 3, "description": "how many", "minimum": 1}
    assert properties["where"]["enum"] == ["title", "body"]
    assert properties["where"]["description"] == "the part."
    assert schema["parameters"]["required"] == ["text"]
    assert tool_of(search).bound({"text": "a", "limit": "2"})() == ["a", "body"]


def untyped(number):
    """Without a type."""


def undocumented(number: int) -> int:
    return number


def nameless(number: int, /) -> int:
    """A parameter that cannot be named."""
    return number


def stream(number: int) -> Iterator[int]:
    """A generator has no answer."""
    yield number


@pytest.mark.parametrize("function", [untyped, undocumented, nameless, stream, 3])
def test_what_is_no_tool_is_refused_by_name(function: Any):
    with pytest.raises(ConfigError, match=getattr(function, "__name__", "3")):
        tool_of(function)


async def test_calls_are_answered_in_order_and_only_a_failure_of_ours_ends_the_episode():
    play = Play(None, [tool_of(add), tool_of(away)])
    messages, schemas = await play.reset(1, {})
    assert messages == []
    assert [schema["function"]["name"] for schema in schemas] == ["add", "away"]
    bad = ToolCall("{", "invalid_json")
    step = await play.step(say("", call("add", a=1, b=2), bad, call("add", a=1, b=2, c=3)))
    contents = [message["content"] for message in step.messages]  # type: ignore[index]
    assert contents[0] == "3"
    assert contents[1].startswith("error: ")
    assert "c: Unexpected keyword argument" in contents[2]
    assert step.info == {"num_tool_errors": 2, "tool_s": pytest.approx(0, abs=60)}
    assert not step.done
    assert len({message["tool_call_id"] for message in step.messages}) == 3  # type: ignore[index]
    with pytest.raises(EpisodeError) as failure:
        await play.step(say("", call("away", what="x")))
    assert failure.value.boundary == "tool"
    assert (await play.step(say("done"))).done


class Loose:
    """Answers with plain values."""

    def reset(self, seed, data):
        """Begin with a text, and a method as tool."""
        return "hello", [self.shout]

    def step(self, reply):
        """End."""
        return ["bye"], 1, True

    def close(self):
        """Do nothing."""

    def shout(self, text: str) -> str:
        """Say it louder."""
        return text.upper()


async def test_plain_functions_texts_and_tuples_are_taken():
    play = Play(Loose())  # type: ignore[arg-type]
    messages, schemas = await play.reset(1, {})
    assert messages == [{"role": "user", "content": "hello"}]
    assert schemas[0]["function"]["name"] == "shout"
    step = await play.step(say("", call("shout", text="a")))
    assert step.messages[0]["content"] == "A"  # type: ignore[index]
    assert await play.step(say("no call")) == Step(
        [{"role": "user", "content": "bye"}], 1.0, True, {"truncated": False, "stop_condition": "done"}
    )


@pytest.mark.parametrize("value", [7, ("a", [], 3, {}, 5), Reset(["a", {"role": "agent"}])])
async def test_what_no_method_may_return_is_a_failure(value: Any):
    class Odd(Echo):
        async def reset(self, seed: int, data: Any) -> Any:
            return value

    with pytest.raises(EpisodeError):
        await Play(Odd()).reset(1, {})


@pytest.mark.parametrize(
    "section", [{}, {"environment": "no path"}, {"tools": ["a:b", "no path"]}, {"tools": ["a:b"], "settings": {"x": 1}}]
)
def test_a_section_without_a_player_is_refused(section: dict[str, Any]):
    with pytest.raises(ValueError, match=r"environment|tools|settings"):
        EnvironmentSection.model_validate(section)


class Losing:
    """ASGI: the answer to the first step is lost on its way."""

    def __init__(self, app: Any) -> None:
        self.app, self.num_steps = app, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, but for the first step."""
        if scope["type"] != "http" or scope["path"] != "/step":
            await self.app(scope, receive, send)
            return
        self.num_steps += 1
        if self.num_steps > 1:
            await self.app(scope, receive, send)
            return

        async def cut(message: Any) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            else:
                raise ConnectionResetError

        await self.app(scope, receive, cut)


@pytest.fixture
def served() -> Iterator[tuple[str, Losing]]:
    """The address of an environment, and its server."""
    app = Losing(app_of(*open_play("tests.support.environments:Echo", (), {}, what="test")))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_keep_alive=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until("the server", lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app
    server.should_exit = True
    thread.join(10)


async def test_a_step_whose_answer_is_lost_is_asked_again_and_played_once(served: tuple[str, Losing]):
    """SWE-ReX #299, slime PR #2161: a retried request ran twice."""
    url, app = served
    make, version = open_play(url, (), {}, what="test")
    assert version == "echo-1"
    play = make()
    messages, _ = await play.reset(3, {"pays": 2})
    assert messages == [{"role": "user", "content": "seed 3"}]
    answers = [await play.step(say(f"word {turn}")) for turn in range(3)]
    assert app.num_steps == 4
    # a step that had run twice would have ended the episode a turn earlier
    assert [answer.done for answer in answers] == [False, False, True]
    assert [answer.reward for answer in answers] == [2.0] * 3
    await play.close()


async def test_failures_of_a_server_keep_their_boundary(served: tuple[str, Losing]):
    url, _ = served
    make, _ = open_play(url, (), {}, what="test")
    with pytest.raises(EpisodeError, match="the sandbox is full") as failure:
        await make().reset(1, {"begin": "sandbox"})
    assert failure.value.boundary == "sandbox"
    with pytest.raises(ConfigError, match=r"test\.environment"):
        open_play("http://127.0.0.1:9", (), {}, what="test")
