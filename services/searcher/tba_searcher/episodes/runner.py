"""Plays the episodes of visits: the runner owns every limit, and says what each failure was.

    begin       WorkQueue         a task for each episode of a visit
    reset       worker            messages and tools, rendered to the first prompt
    generate    engine            one request per reply; `take_turns` hands them to the engine's next step
    step        worker            the answer, appended to the tokens; and so on until done, or a limit
    ended       on_played         the episode joins its visit, which is complete with the last one

An agent plays by itself: its worker calls the searcher's endpoint for replies (endpoint.py), and a recorder keeps them.

A failure of ours (engine, environment, tool, sandbox, judge) ends an episode, which is played again as a whole under a
new id, MAX_ATTEMPTS times in all. The last attempt is stored as failed: nothing trains on it. What the policy does
wrong is data: a bad call is answered by a tool message, and a reply at a limit ends the episode as truncated. A reply
that was cut is no call: it is not executed. A call is sent to the worker once.

Episodes go on while other weights are loaded: the spans of their tokens say which version sampled them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_urlsafe
from tempfile import TemporaryDirectory
from typing import Any

from tba.config import Recipe
from tba.config.environments import EnvironmentSection
from tba.environments import EpisodeError, Outcome, Policy
from tba.environments.play import user_messages
from tba.environments.protocol import Stage
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire.codec import new_id
from tba_searcher.conversations.chat import ChatRenderer, RenderError, checked
from tba_searcher.engines.engine import Completion, Request
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.episodes.conversation import Conversation, PlayedEpisode, with_truncated_reward
from tba_searcher.episodes.endpoint import Endpoint
from tba_searcher.episodes.recorder import Recorder
from tba_searcher.episodes.worker_pool import Session, WorkerPool
from tba_searcher.waits import WaitRegistry

MAX_ATTEMPTS = 3
EPISODES_PER_SLOT = 8
"""Most open episodes for each slot of the engine: as many as keep it busy where an answer takes seven times as long as
a reply."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 15.0
"""Between the attempts of an episode; the pause doubles with each failure in a row of its environment."""
POLL_S = 0.1
"""How often the limits of an agent are looked at."""
REFUSED_S = 0.5
"""Before a visit is given back whose prompt cannot be played: the buffer may grant another one at once."""
log = get_logger("episodes")


@dataclass(slots=True)
class _Open:
    """An episode in progress."""

    task: asyncio.Task[None]
    pinned: PolicyVersion | None
    turns: dict[str, asyncio.Future[Completion]] = field(default_factory=dict)
    """Replies that the engine samples, by request id."""


@dataclass(slots=True)
class _Ending:
    """How an episode ended."""

    stop_condition: str = "failed"
    is_truncated: bool = False
    boundary: str | None = None
    """The part that failed; None: none did."""
    stage: Stage = "reset"
    detail: str = ""
    session: str | None = None
    """Of an agent: the conversation that is stored."""
    reward: float | None = None
    """Of an agent: what its play paid."""


class EpisodeRunner:
    """Plays episodes as tasks of the searcher's event loop.

    Args:
        counts: gets the numbers of episodes, failures and tool calls.
    """

    def __init__(self, recipe: Recipe, *, codec: TextCodec, counts: Counter[str], waits: WaitRegistry) -> None:
        self._recipe, self._codec, self._counts, self._waits = recipe, codec, counts, waits
        self._pools = {task: WorkerPool(task, section) for task, section in recipe.environments.items()}
        self._open: defaultdict[str, dict[str, _Open]] = defaultdict(dict)
        self._turns: defaultdict[PolicyVersion | None, deque[Request]] = defaultdict(deque)
        self._failures: dict[str, tuple[int, float]] = {}
        """For each task, failures in a row of its environment, and when the last one ended."""
        self._closing: set[asyncio.Task[None]] = set()
        self._endpoint = Endpoint(recipe.searcher.max_prompt_tokens + recipe.searcher.max_response_tokens)
        self._tokenizer: TemporaryDirectory[str] | None = None
        self.max_attempts = MAX_ATTEMPTS
        self.num_resetting = 0
        """Episodes that will ask for their first reply soon."""
        self.on_played: Callable[[str, PlayedEpisode], None] = lambda lease_id, played: None
        """Called with lease id and episode at the end of each."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called when an episode asks for a reply."""
        self.on_abandoned: Callable[[str], None] = lambda request_id: None
        """Called with the id of a request that the engine samples, and nobody waits for any more."""

    def plays(self, task: str) -> bool:
        """Return whether prompts of a task are played as episodes."""
        return task in self._pools

    @property
    def num_open(self) -> int:
        """Number of episodes in progress."""
        return sum(map(len, self._open.values()))

    def has_room(self, pinned: PolicyVersion | None) -> bool:
        """Return whether another episode may begin; those of training wait while an evaluation pins a version."""
        num_open = sum(each.pinned == pinned for episodes in self._open.values() for each in episodes.values())
        return num_open < EPISODES_PER_SLOT * self._recipe.searcher.num_slots

    async def start(self) -> None:
        """Start the workers; raise ConfigError if an environment, or the chat template, cannot be used."""
        self._codec.renderer({}).prove()  # it logs what cannot be appended
        await asyncio.gather(*(pool.start() for pool in self._pools.values()))
        if any(pool.is_agent for pool in self._pools.values()):
            self._tokenizer = TemporaryDirectory(prefix="tba-tokenizer-")
            self._codec.save(self._tokenizer.name)
            await self._endpoint.start()

    async def close(self) -> None:
        """Cancel all episodes and kill the workers."""
        tasks = [each.task for episodes in self._open.values() for each in episodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self._endpoint.close(), *(pool.close() for pool in self._pools.values()))
        if self._tokenizer is not None:
            self._tokenizer.cleanup()

    def begin(self, lease_id: str, prompt: Any, request: Request, pinned: PolicyVersion | None) -> None:
        """Begin an episode of a prompt; `request` has the settings of its replies, and its id."""
        task = asyncio.create_task(self._play(lease_id, prompt, request, pinned))
        self._open[lease_id][request.request_id] = _Open(task, pinned)
        task.add_done_callback(lambda task: self._forget(lease_id, request.request_id, task))

    def take_turns(self, max_requests: int, *, pinned: PolicyVersion | None) -> list[Request]:
        """Remove and return the next requests of open episodes that were begun with `pinned`."""
        queue = self._turns[pinned]
        return [queue.popleft() for _ in range(min(max_requests, len(queue)))]

    def settle(self, completion: Completion) -> None:
        """Give a reply to the episode that waits for it."""
        episode = self._episode_of(completion.request_id)
        future = None if episode is None else episode.turns.pop(completion.request_id, None)
        if future is not None and not future.done():
            future.set_result(completion)

    def refuse(self, request_id: str, reason: str) -> bool:
        """Fail the episode whose request the engine refused; return whether it is one of an episode."""
        episode = self._episode_of(request_id)
        future = None if episode is None else episode.turns.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(EpisodeError(reason, boundary="engine"))
        return "." in request_id.rpartition("/")[2]  # the episode may have ended

    def cancel(self, lease_id: str) -> list[str]:
        """Cancel the episodes of a visit; return the ids of their requests, for the engine to abort."""
        episodes = self._open.pop(lease_id, {})
        for episode in episodes.values():
            episode.task.cancel()
        ids = {request_id for episode in episodes.values() for request_id in episode.turns}
        for queue in self._turns.values():
            for request in [each for each in queue if each.request_id in ids]:
                queue.remove(request)
        return sorted(ids)

    def cancel_all(self) -> list[str]:
        """Cancel all episodes; return the ids of their requests."""
        return [request_id for lease_id in list(self._open) for request_id in self.cancel(lease_id)]

    def _forget(self, lease_id: str, request_id: str, task: asyncio.Task[None]) -> None:
        episodes = self._open.get(lease_id)
        if episodes is not None:
            episodes.pop(request_id, None)
            if not episodes:
                del self._open[lease_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error  # a defect of ours: the loop's handler logs it

    async def _play(self, lease_id: str, prompt: Any, request: Request, pinned: PolicyVersion | None) -> None:
        """Play an episode, again and again if something of ours fails."""
        task = prompt.task
        for attempt in range(1, self.max_attempts + 1):
            begun_s = time.monotonic()
            played, boundary = await self._attempt(prompt, request, pinned, attempt)
            episode = played.episode
            self._count(task, episodes=1, episodes_truncated=episode.is_truncated, tool_calls=episode.num_tool_calls)
            if played.is_hopeless or (boundary == "limit" and not played.sequences):
                await asyncio.sleep(REFUSED_S)
                break
            if boundary in (None, "limit"):
                self._failures.pop(task, None)
                self._waits.end(f"episodes of {task}")
                break
            self._count(task, **{f"episodes_failed_{boundary}": 1})
            log.warning(
                "episode failed",
                task=task,
                prompt_id=prompt.prompt_id,
                episode_id=episode.episode_id,
                attempt=attempt,
                reason=played.failure,
            )
            failures, last_s = self._failures.get(task, (0, 0.0))
            # what fails together counts once: a worker that dies takes all of its episodes with it
            if begun_s > last_s:
                failures, last_s = failures + 1, time.monotonic()
            self._failures[task] = failures, last_s
            # a few failures are those of an episode; many in a row say that the environment is away
            if failures > MAX_ATTEMPTS:
                self._waits.renew(f"episodes of {task}", "environment-failing", detail=played.failure or "")
            await asyncio.sleep(min(MIN_PAUSE_S * 2 ** min(failures - 1, 16), MAX_PAUSE_S))
        self.on_played(lease_id, played)

    async def _attempt(
        self, prompt: Any, request: Request, pinned: PolicyVersion | None, attempt: int
    ) -> tuple[PlayedEpisode, str | None]:
        """Play an episode once; return it, and the boundary of its failure (None: it has not failed)."""
        section, pool = self._recipe.environments[prompt.task], self._pools[prompt.task]
        episode_id, begun_s = new_id("episode"), time.time()
        talk, ending, session, recorder = Conversation([], ()), _Ending(), None, None
        self.num_resetting += 1
        is_resetting = True
        try:
            session = await pool.open(episode_id)
            renderer = self._codec.renderer(prompt.chat_template_kwargs)
            asked = replace(request, request_id=f"{request.request_id}.{attempt}")
            if pool.is_agent:
                self.num_resetting -= 1
                is_resetting = False
                asked = replace(asked, eos_ids=tuple(sorted({*asked.eos_ids, *renderer.stop_ids})))
                recorder = Recorder(
                    partial(self._generate, pinned=pinned),
                    asked,
                    renderer=renderer,
                    codec=self._codec,
                    limits=(*self._limits(section), section.max_turns),
                )
                await self._accompany(prompt, recorder, ending, session, section)
            else:
                messages, tools = await session.reset(prompt.environment_seed, prompt.data)
                self.num_resetting -= 1
                is_resetting = False
                ending.stage = "render"
                talk.tools = tools or prompt.tools
                start = [*(prompt.messages or ()), *messages]
                talk.add_messages(checked(start or user_messages(prompt.text)))
                talk.begin(renderer.render(talk.history, tools=talk.tools))
                await self._converse(talk, ending, session, section, renderer, asked, pinned)
        except EpisodeError as error:
            ending.boundary, ending.detail = error.boundary, str(error)
        except RenderError as error:
            ending.boundary, ending.detail = "environment", str(error)
        except Exception as error:  # an episode that ends without a word would hold its visit for ever
            log.error("episode failed in the searcher", episode_id=episode_id, exc_info=True)
            ending.boundary, ending.detail = "environment", f"{type(error).__name__}: {error}"
        finally:
            self.num_resetting -= is_resetting
            if session is not None:
                times = {"environment_s": session.environment_s, "tool_s": session.tool_s}
                self._count(prompt.task, environment_answers=session.num_answers, **times)
                # not awaited: an environment may take its time to close
                self._closing.add(closing := asyncio.create_task(session.close()))
                closing.add_done_callback(self._closing.discard)
        if recorder is not None:
            talk = recorder.conversation(ending.session)
            talk.turn_rewards[-1:] = [ending.reward][: len(talk.turn_rewards)]
            self._counts["agent_calls_dropped"] += recorder.num_answered - len(talk.completions)
        reward = section.truncated_reward
        boundary = "limit" if ending.is_truncated and reward is None else ending.boundary
        detail = ending.detail or ending.stop_condition
        texts = [] if talk.last is None else self._codec.decode_responses([talk.last])
        played = talk.played(
            request.sampling,
            begun_s,
            texts[0] if texts else "",
            failure=None if boundary is None else _shown(f"{boundary} {ending.stage}: {detail}", 2000),
            is_hopeless=not (talk.completions or (recorder and recorder.num_answered))
            and (boundary == "limit" or ending.stage == "render"),
            episode_id=episode_id,
            environment=prompt.task,
            environment_version=pool.version,
            seed=prompt.environment_seed,
            seat=prompt.environment_seat,
            stop_condition=ending.stop_condition if ending.boundary is None else f"{ending.boundary}_failed",
            is_truncated=ending.is_truncated,
        )
        if ending.is_truncated and reward is not None and talk.completions:
            played = with_truncated_reward(played, reward)
        return played, boundary

    async def _converse(
        self,
        talk: Conversation,
        ending: _Ending,
        session: Session,
        section: EnvironmentSection,
        renderer: ChatRenderer,
        request: Request,
        pinned: PolicyVersion | None,
    ) -> None:
        """Sample replies and let the environment answer them, until it is done or a limit is reached."""
        max_prompt, max_reply, max_tokens = self._limits(section)
        ends = tuple(sorted({*request.eos_ids, *renderer.stop_ids}))
        while True:
            room = min(max_reply, max_tokens - talk.num_tokens)
            is_long = len(talk.prompt) > max_prompt
            limit, most = ("max_prompt_tokens", max_prompt) if is_long else ("max_tokens", max_tokens)
            if is_long or room < max(1, request.min_response_tokens):
                if not talk.completions:  # nothing to store, and no attempt will differ
                    said = f"its first prompt has {len(talk.prompt)} tokens ({limit} is {most})"
                    raise EpisodeError(said, boundary="limit")
                ending.stop_condition, ending.is_truncated = limit, True
                return
            if talk.is_full:
                ending.stop_condition, ending.is_truncated = "max_segments", True
                return
            turn, prompt = talk.turn, tuple(talk.prompt)
            ending.stage = "generate"
            asked = replace(
                request,
                request_id=f"{request.request_id}.{turn}",
                prompt_tokens=prompt,
                max_response_tokens=room,
                eos_ids=ends,
                # an engine may still hold the keys and values of the last turn
                continues=f"{request.request_id}.{turn - 1}" if talk.is_continued else None,
                may_continue=turn + 1 < section.max_turns,
            )
            completion = await self._generate(asked, pinned)
            ending.stage = "step"
            ids = completion.response_tokens.tolist()
            reply = renderer.parse(prompt, ids, tools=talk.tools)
            talk.add_reply(completion, reply, self._codec.decode_responses([completion])[0])
            if completion.finish_reason == "length":
                is_short = room < max_reply
                ending.stop_condition = "max_tokens" if is_short else "max_response_tokens"
                ending.is_truncated = True
                talk.turn_rewards.append(None)
                return
            talk.turn_rewards.append(None)
            answer, talk.turn_rewards[-1], done, info = await session.step(reply)
            messages = checked(user_messages(answer))
            self._counts["tool_calls_failed"] += int(info.get("num_tool_errors", 0))
            talk.add_messages(messages if done else [self._cut(each, section.max_tool_tokens) for each in messages])
            if done:
                ending.stop_condition = _shown(info.get("stop_condition") or "done", 100)
                ending.is_truncated = bool(info.get("truncated"))
                return
            if not messages:
                raise EpisodeError("step returned no messages, and done is false; give one, or say that it is done")
            if talk.turn >= section.max_turns or session.environment_s > section.episode_timeout_s:
                is_late = talk.turn < section.max_turns
                ending.stop_condition, ending.is_truncated = "episode_timeout_s" if is_late else "max_turns", True
                return
            ending.stage = "render"
            new = talk.history[-len(messages) :]
            rendering = renderer.bridge(prompt, ids, new, tools=talk.tools, turn=turn)
            if rendering is None:
                talk.begin(renderer.render(talk.history, tools=talk.tools))
            else:
                talk.append(rendering)

    async def _accompany(
        self, prompt: Any, recorder: Recorder, ending: _Ending, session: Session, section: EnvironmentSection
    ) -> None:
        """Let an agent play, answer its calls, and watch its limits of time.

        Raises:
            EpisodeError: it failed, asked for nothing for too long, or made no call that can be stored.
        """
        ending.stage, secret = "step", token_urlsafe()
        assert self._tokenizer is not None
        policy = Policy(self._endpoint.url, secret, self._tokenizer.name)
        with self._endpoint.open(secret, recorder):
            play = asyncio.create_task(session.play(prompt.environment_seed, prompt.data, policy))
            try:
                while not play.done() and recorder.failure is None:
                    idle_s, all_s = recorder.idle_s
                    if idle_s > section.turn_timeout_s:
                        session.give_up(f"asked for nothing for more than {section.turn_timeout_s:g} s")
                        raise EpisodeError(f"it asked for nothing for more than {section.turn_timeout_s:g} s")
                    if all_s > section.episode_timeout_s:
                        if not recorder.num_answered:
                            raise EpisodeError(f"it had no reply in {section.episode_timeout_s:g} s")
                        if recorder.only_session is None:
                            raise EpisodeError("episode_timeout_s, in several sessions", boundary="limit")
                        ending.stop_condition, ending.is_truncated = "episode_timeout_s", True
                        return
                    await asyncio.wait([play], timeout=POLL_S)
                if recorder.failure is not None:
                    ending.stage = "generate"
                    raise recorder.failure
                outcome = play.result()
            except EpisodeError as error:
                # agents may fail when they get no more replies
                if error.boundary != "environment" or recorder.only_session not in recorder.truncated:
                    raise
                outcome = Outcome(None, str(recorder.only_session))
            finally:
                play.cancel()
        limit = recorder.truncated.get(outcome.session)
        if not recorder.num_calls(outcome.session):
            # where others were asked, the game has ended before it was this seat's turn
            boundary = "limit" if limit or recorder.num_answered else "environment"
            raise EpisodeError(f"no reply in session {outcome.session!r} ({limit or 'no call'})", boundary=boundary)
        ending.session, ending.reward = outcome.session, outcome.reward
        ending.stop_condition = limit or _shown(outcome.stop_condition, 100)
        ending.is_truncated = outcome.truncated or limit is not None

    def _limits(self, section: EnvironmentSection) -> tuple[int, int, int]:
        """Return the most tokens before a reply, of a reply, and of a rollout."""
        searcher, most = self._recipe.searcher, self._recipe.trainer.micro_batch_tokens
        # a pass of the trainer holds whole rollouts
        return searcher.max_prompt_tokens, searcher.max_response_tokens, min(section.max_tokens or most, most)

    async def _generate(self, request: Request, pinned: PolicyVersion | None) -> Completion:
        """Return the engine's reply to a request."""
        episode = self._episode_of(request.request_id)
        assert episode is not None
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        episode.turns[request.request_id] = future
        self._turns[pinned].append(request)
        self.on_turn()
        try:
            return await future
        except asyncio.CancelledError:  # an agent's episode ended before its last calls
            episode.turns.pop(request.request_id, None)
            if request in self._turns[pinned]:
                self._turns[pinned].remove(request)
            else:
                self.on_abandoned(request.request_id)
            raise

    def _episode_of(self, request_id: str) -> _Open | None:
        """Return the open episode of a turn's request, whose id is that of the episode, attempt and turn."""
        name = request_id.rsplit(".", 2)[0]
        return self._open.get(name.rpartition("/")[0], {}).get(name)

    def _count(self, task: str, **numbers: float) -> None:
        for name, number in numbers.items():
            for key in (name, f"{name}/{task}"):
                self._counts[key] += number  # pyright: ignore[reportArgumentType]

    def _cut(self, message: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Return a message with the answer of a tool cut to a number of tokens."""
        if message.get("role") != "tool":
            return message
        return {**message, "content": self._codec.cut(str(message.get("content") or ""), max_tokens)}


def _shown(value: object, max_chars: int) -> str:
    """Return a value of foreign code as a text that can be stored and printed."""
    return "".join(char if char.isprintable() else "?" for char in str(value)[:max_chars])
