"""Tasksets and environments of verifiers 0.4, unchanged: `settings = {taskset = {id = "glossary"}}`.

`data.idx` of a prompt is the number of its task, and `data.seat` that of the agent whose conversation trains, in the
order of the environment's config; the other seats play by the same policy. `env` has what verifiers reads from its
`[env]` block, and `renderer` the config of the client's renderer, such as `{name = "qwen3"}`.

Agents without a harness of their own, or with `null` or `bash`, talk in this process: those start programs by uv.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from tba.environments.adapters import required, version_of
from tba.environments.protocol import Boundary, EpisodeError, Outcome, Policy

__all__ = ["Chat", "Verifiers"]  # noqa: F822 # pyright: ignore[reportUnsupportedDunderAll]
HARNESS = "tba_chat"
BOUNDARIES: dict[str, Boundary] = {"ToolsetError": "tool", "SandboxError": "sandbox", "TaskError": "judge"}


class Verifiers:
    """Implements `Agent`: an episode of verifiers asks the searcher's endpoint for tokens."""

    version = version_of("verifiers")

    def __init__(
        self, taskset: dict[str, Any], env: dict[str, Any] | None = None, renderer: dict[str, Any] | None = None
    ) -> None:
        required("verifiers.v1", "verifiers")
        self._world = _world(json.dumps({**(env or {}), "taskset": taskset}), json.dumps(renderer))

    async def play(self, seed: int, data: Mapping[str, Any], policy: Policy) -> Outcome:
        """Play a task; the reward is the sum of the seat's rewards, if all of them are known."""
        return await self._world.play(data["idx"], data.get("seat", 0), policy)

    async def close(self) -> None:
        """Leave the environment to the next episodes."""


@cache
def _world(env: str, renderer: str) -> _World:
    """Return the environment that all episodes of a process share."""
    return _World(json.loads(env), json.loads(renderer))


class _World:
    def __init__(self, env: dict[str, Any], renderer: dict[str, Any] | None) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import agent_config_fields

        self._vf, self._renderer = vf, renderer
        # a plug-in of verifiers is a module of one name
        sys.modules.setdefault(HARNESS, sys.modules[__name__])
        agents = agent_config_fields(vf.resolve_env_config(env))
        self._seats = list(agents)
        for seat, config in agents.items():
            env[seat] = {"runtime": {"type": "subprocess"}, **(env.get(seat) or {})}
            if config.harness is None or config.harness.id in ("null", "bash"):
                env[seat]["harness"] = {"id": HARNESS}
        self._env = vf.load_environment(vf.resolve_env_config(env))
        self._tasks = iter(self._env.taskset.load())
        self._known: list[Any] = []
        self._serving: Any = None
        self._starting = asyncio.Lock()

    async def play(self, number: int, seat: int, policy: Policy) -> Outcome:
        vf = self._vf
        async with self._starting:
            if self._serving is None:
                self._serving = self._env.serving()
                await self._serving.__aenter__()  # until the process ends
        while len(self._known) <= number and (task := next(self._tasks, None)) is not None:
            self._known.append(task)
        if not (0 <= number < len(self._known) and 0 <= seat < len(self._seats)):
            raise EpisodeError(f"there is no task {number} or no seat {seat} (seats: {', '.join(self._seats)})")
        url, tokenizer = f"{policy.url}/v1", policy.tokenizer
        given = {"api_key_var": "TBA_NO_KEY", "renderer": self._renderer, "renderer_model_name": tokenizer}
        client = vf.TrainClientConfig(base_url=url, **given)
        # all episodes share a connection: the secret goes into the body
        sampling = vf.SamplingConfig(cache_salt=policy.secret)
        (slot,) = self._env.slots(self._known[number])
        episode = await self._env.run_slot(slot, vf.ModelContext(model="policy", client=client, sampling=sampling))
        found = [each for each in episode.traces if each.agent.name == self._seats[seat] and each.agent.trainable]
        own = [error for each in found for error in each.errors]
        if len(found) == 1 and any(each.type == "ProviderError" and each.status_code == 400 for each in own):
            return Outcome(None, found[0].id, "max_tokens", truncated=True)  # a limit of the recipe
        if errors := [*episode.errors, *own]:
            said = f"{errors[-1].type}: {errors[-1].message}"
            raise EpisodeError(said, boundary=BOUNDARIES.get(errors[-1].type, "environment"))
        if len(found) != 1:
            raise EpisodeError(f"seat {self._seats[seat]} has {len(found)} conversations; one of them can train")
        (trace,) = found
        unknown = [name for name, reward in trace.rewards.items() if reward is None]
        if unknown or not (trace.ok and episode.ok):  # `trace.reward` would count an unknown one as 0
            raise EpisodeError(f"no reward {', '.join(unknown)} ({trace.stop_condition})", boundary="judge")
        reward = trace.reward if trace.rewards else None
        return Outcome(reward, trace.id, trace.stop_condition or "done", trace.is_truncated)


def __getattr__(name: str) -> Any:
    if name == "Chat":
        return _chat_harness()
    raise AttributeError(name)


@cache
def _chat_harness() -> type:
    """Return the harness of a chat with tools, in this process."""
    import httpx
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    class Chat(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages: list[dict[str, Any]] = [] if not system else [{"role": "system", "content": system}]
            prompt = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
            messages += map(message_to_wire, prompt)
            async with AsyncExitStack() as stack:
                servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
                tools, dispatch, connected = await connect_mcp(servers, stack)
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
                while True:
                    body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                    answer = await client.post(
                        f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                    )
                    if answer.is_error:  # the trace has the error, or what stopped it
                        return vf.ProgramResult(1, "", answer.text)
                    message = answer.json()["choices"][0]["message"]
                    messages.append(message)
                    if not message.get("tool_calls"):
                        return vf.ProgramResult(0, "", "")
                    for call in message["tool_calls"]:
                        name, text = call["function"]["name"], "error: there is no such tool"
                        if name in dispatch:
                            try:
                                arguments = json.loads(call["function"]["arguments"] or "{}")
                                text = await call_mcp(connected, dispatch, name, arguments)
                            except (ValueError, TypeError) as error:  # no JSON, or no object
                                text = f"error: {error}"
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    return Chat
