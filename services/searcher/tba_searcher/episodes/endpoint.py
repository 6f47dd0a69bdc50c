"""The address on loopback where agents ask the policy for replies, with a secret for each episode.

    POST /inference/v1/generate    tokens -> tokens and log-probs, as vLLM answers (verifiers)
    POST /v1/chat/completions      messages and tools -> a message, as OpenAI answers (any agent)
    GET  /v1/models                the model, and the most tokens of a prompt with its reply

The secret is the bearer token, or `cache_salt` where many episodes share a client. `X-Session-ID` names one of several
conversations of an episode. The recipe's sampling holds: temperature and the like of a request are not read. A repeated
`Idempotency-Key`, or a retry of a Stainless client, gets the answer that is stored.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from tba.api.prompts import PromptTools
from tba.environments import EpisodeError
from tba_searcher.conversations.chat import RenderError
from tba_searcher.episodes.recorder import Call, CallRefusedError, Recorder

MODEL = "policy"
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
MaxTokens = Annotated[int | None, Field(ge=1)]


class _Sampling(BaseModel):
    max_tokens: MaxTokens = None
    n: Literal[1] | None = 1
    stop: None = None


class _Generate(BaseModel):
    token_ids: Tokens
    sampling_params: _Sampling = _Sampling()
    cache_salt: str = ""
    features: None = None


class _Chat(BaseModel):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: PromptTools | None = None
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    n: Literal[1] | None = 1
    stop: None = None
    stream: Literal[False] | None = False
    response_format: None = None


class Endpoint:
    """Serves the model calls of all episodes of a searcher; call `start` before `open`."""

    def __init__(self, max_tokens: int) -> None:
        self._recorders: dict[str, Recorder] = {}
        self._answers: dict[str, dict[str, asyncio.Task[tuple[Call, dict[str, Any]]]]] = {}
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off"}
        # an agent may pause, and its client must not lose its connection meanwhile
        self._server = _Server(uvicorn.Config(self._app(max_tokens), timeout_keep_alive=3600, **quiet))
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        """Stop listening."""
        if self.url:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    @contextmanager
    def open(self, secret: str, recorder: Recorder) -> Iterator[None]:
        """Answer the calls of an episode in the block; cancel at its end those that are in progress."""
        self._recorders[secret], self._answers[secret] = recorder, {}
        try:
            yield
        finally:
            del self._recorders[secret]
            for task in self._answers.pop(secret).values():
                task.cancel()

    def _app(self, max_tokens: int) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": max_tokens}]}

        @app.post("/inference/v1/generate")
        async def generate(request: Request, body: _Generate) -> JSONResponse:
            limit = body.sampling_params.max_tokens

            async def reply(recorder: Recorder, session: str) -> tuple[Call, dict[str, Any]]:
                call = await recorder.reply_to_tokens(session, body.token_ids, limit)
                return call, _token_choice(call)

            return await self._answer(request, body.cache_salt, reply)

        @app.post("/v1/chat/completions")
        async def chat(request: Request, body: _Chat) -> JSONResponse:
            limit = body.max_completion_tokens or body.max_tokens

            async def reply(recorder: Recorder, session: str) -> tuple[Call, dict[str, Any]]:
                messages = [{**each, "content": _text(each.get("content"))} for each in body.messages]
                call = await recorder.reply_to_messages(session, messages, body.tools or [], limit)
                return call, _message_choice(call)

            return await self._answer(request, "", reply)

        return app

    async def _answer(
        self, request: Request, secret: str, reply: Callable[[Recorder, str], Awaitable[tuple[Call, dict[str, Any]]]]
    ) -> JSONResponse:
        secret = secret or request.headers.get("authorization", "").removeprefix("Bearer ")
        recorder, answers = self._recorders.get(secret), self._answers.get(secret)
        if recorder is None or answers is None:
            return _refusal(401, "no episode in progress has this secret; use the one that `play` was given")
        session = request.headers.get("x-session-id", "")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        key = request.headers.get("idempotency-key", "")
        is_kept = bool(key) or "x-stainless-retry-count" in request.headers
        name = sha256(json.dumps([request.url.path, session, key, (await request.body()).hex()]).encode()).hexdigest()

        async def ask() -> tuple[Call, dict[str, Any]]:
            call, choice = await reply(recorder, session)
            num_prompt, num_reply = len(call.prompt), len(call.completion.response_tokens)
            name, total = call.completion.request_id, num_prompt + num_reply
            usage = {"prompt_tokens": num_prompt, "completion_tokens": num_reply, "total_tokens": total}
            told = {"id": name, "request_id": name, "model": MODEL, "created": int(time.time()), "choices": [choice]}
            return call, {**told, "object": "chat.completion", "usage": usage}

        task = answers.get(name) if key or is_retry else None
        if task is None or task.cancelled() or (task.done() and task.exception() is not None):
            task = asyncio.create_task(ask())
            slot = name if is_kept else str(id(task))
            if (older := answers.get(slot)) is not None:  # the same was asked twice at once
                answers[str(id(older))] = older
            answers[slot] = task
            if not is_kept:
                task.add_done_callback(lambda _: answers.pop(slot, None))
        try:
            call, answer = await asyncio.shield(task)
            call.is_lost = await request.is_disconnected()  # until it is asked for again
            return JSONResponse(answer)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return _refusal(409, "the episode has ended")
        except CallRefusedError as error:  # 400 means a limit, and nothing else: agents end by it
            return _refusal(400, str(error))
        except (RenderError, ValueError) as error:
            return _refusal(422, str(error))
        except EpisodeError as error:
            return _refusal(500, str(error))


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the searcher."""
        yield


def _token_choice(call: Call) -> dict[str, Any]:
    ids, logprobs = call.completion.response_tokens.tolist(), call.completion.sampler_logprobs.tolist()
    content = [{"token": f"token_id:{number}", "logprob": value} for number, value in zip(ids, logprobs, strict=True)]
    reason = "length" if call.completion.finish_reason == "length" else "stop"
    return {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}


def _message_choice(call: Call) -> dict[str, Any]:
    assert call.history is not None
    message = dict(call.history[-1])
    reason = "length" if call.completion.finish_reason == "length" else "stop"
    if calls := message.get("tool_calls"):
        reason = "tool_calls"
        message["tool_calls"] = [
            {**each, "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}
            for each in calls
        ]
    return {"index": 0, "message": message, "finish_reason": reason}


def _text(content: Any) -> Any:
    """Return the text of a content that is a list of parts."""
    if not isinstance(content, list):
        return content
    if any(not isinstance(each, dict) or each.get("type") != "text" for each in content):
        raise ValueError("a content has parts that are no text; this endpoint takes texts alone")
    return "".join(str(each.get("text", "")) for each in content)


def _refusal(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error", "code": status}}, status)
