"""`python -m tba.environments.server MODULE:CLASS --port 9000`: serve an environment by HTTP (remote.py)."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from tba.environments.play import Play, open_play
from tba.environments.protocol import EpisodeError, Reply, ToolCall

MAX_EPISODES = 4096


@dataclass
class _Episode:
    play: Play
    turn: int = 0
    answer: dict[str, Any] = field(default_factory=dict)
    """Of the last turn."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def app_of(make: Callable[[], Play], version: str) -> FastAPI:
    """Return the application; a turn that is asked for twice is answered twice, and played once."""
    app, episodes = FastAPI(), dict[str, _Episode]()

    @app.exception_handler(Exception)
    async def failed(_: Any, error: Exception) -> JSONResponse:
        boundary = error.boundary if isinstance(error, EpisodeError) else "environment"
        return JSONResponse({"boundary": boundary, "detail": f"{type(error).__name__}: {error}"}, 502)

    app.add_exception_handler(EpisodeError, failed)

    @app.get("/")
    async def info() -> dict[str, Any]:
        return {"version": version}

    @app.post("/reset")
    async def reset(body: dict[str, Any]) -> dict[str, Any]:
        if body["episode_id"] not in episodes:
            while len(episodes) >= MAX_EPISODES:  # of searchers that are gone
                await episodes.pop(next(iter(episodes))).play.close()
            episodes[body["episode_id"]] = _Episode(make())
        episode = episodes[body["episode_id"]]
        async with episode.lock:
            if not episode.answer:
                messages, tools = await episode.play.reset(body["seed"], body["data"])
                episode.answer = {"messages": messages, "tools": tools}
            return episode.answer

    @app.post("/step")
    async def step(body: dict[str, Any]) -> dict[str, Any]:
        if body["episode_id"] not in episodes:
            raise EpisodeError("the episode is not known; the server may have been started anew")
        episode, said = episodes[body["episode_id"]], body["reply"]
        async with episode.lock:
            if body["turn"] not in (episode.turn, episode.turn + 1):
                raise EpisodeError(f"turn {body['turn']} after turn {episode.turn}")
            if body["turn"] != episode.turn:
                calls = tuple(ToolCall(**call) for call in said["tool_calls"])
                episode.turn, episode.answer = body["turn"], {}
                episode.answer = (await episode.play.step(Reply(said["content"], said["reasoning"], calls)))._asdict()
            if not episode.answer:
                raise EpisodeError("this step has failed before")
            return episode.answer

    @app.post("/close")
    async def close(body: dict[str, Any]) -> dict[str, Any]:
        if (episode := episodes.pop(body["episode_id"], None)) is not None:
            async with episode.lock:
                await episode.play.close()
        return {}

    return app


def main() -> None:
    """Serve the environment that the first argument names."""
    parser = argparse.ArgumentParser(description="Serve an environment, for `environment` of a recipe.")
    parser.add_argument("environment", help="MODULE:CLASS")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    args = parser.parse_args()
    make, version = open_play(args.environment, (), {}, what="the argument")
    uvicorn.run(app_of(make, version), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
