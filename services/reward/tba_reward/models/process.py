"""One model process as the service sees it: ask it, watch it, kill it, start it again.

    loading --> ready --> loading (it died or hung) ...
        `-----> failed (a sentence) --> loading, a while later

Who waits for what: an ask waits for its answer, at most its own deadline. The process has `load_timeout_s` to load its
models. While it owes answers it has to say something every `batch_timeout_s` (a batch begins, an answer), or it is
killed with all that it has started. When it dies, the texts of the batch that it computed are the suspects: each is
asked once more, in a batch of its own, so that the next death has one culprit. All others are asked again as if
nothing had been. Who is suspected is remembered when its request is given up, so that the request that comes in its
place does not begin anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from typing import Literal

import msgspec

from tba.logs import get_logger
from tba_reward.models.channel import Channel, DeathError, open_channel
from tba_reward.models.messages import Answer, Ask, Began, Drop, Loaded, LoadFailed, ModelSet, frame
from tba_reward.scorers.base import Failure, Outcome

log = get_logger("models")

MAX_ATTEMPTS = 2
MAX_SUSPECTS = 4096
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

_Text = tuple[str, str, bool]


@dataclass(slots=True)
class _Pending:
    """An ask that somebody waits for."""

    ask: Ask
    answer: asyncio.Future[Outcome]


class ModelProcess:
    """A set of models in a process of its own, shared by all scorers that need the same set.

    Args:
        models: what to load.
        load_timeout_s: deadline of loading.
        batch_timeout_s: longest silence while answers are owed.
    """

    def __init__(self, models: ModelSet, *, load_timeout_s: float, batch_timeout_s: float) -> None:
        self._models = models
        self._load_timeout_s, self._batch_timeout_s = load_timeout_s, batch_timeout_s
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._owed: dict[int, Ask] = {}  # sent to the process that runs now, and not answered
        self._computing: set[int] = set()
        self._deaths: dict[_Text, list[DeathError]] = {}  # of the processes that computed this text; the oldest first
        self._sign_s = 0.0  # when the process last said something, or had nothing to say
        self._state: Literal["closed", "loading", "ready", "failed"] = "closed"
        self._trouble = "it was not started"
        self._settled = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._digest = ""
        self._num_answers = 0  # of the process that runs now

    @property
    def digest(self) -> str:
        """SHA-256 of the files of the models; empty until they were loaded. It does not change after that."""
        return self._digest

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._channel is None else self._channel.pid

    def health(self) -> str:
        """`ok`, or a sentence."""
        return "ok" if self._state == "ready" else f"the model process does not answer: {self._trouble}"

    async def start(self) -> None:
        """Start the process if it does not run, and wait until its models are loaded or the first attempt failed."""
        if self._life is None:
            self._state, self._trouble = "loading", "its models are being loaded"
            self._life = asyncio.create_task(self._live(), name="model-process")
        await self._settled.wait()

    async def close(self) -> None:
        """Kill the process; asks without an answer are failures."""
        life, self._life = self._life, None
        if life is not None:
            life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life
        self._state, self._trouble = "closed", "it was closed"
        self._settled.clear()
        self._fail_all(Failure("crashed", self.health()))

    async def ask(self, prompt: str, response: str, *, finished: bool = True, timeout_s: float) -> Outcome:
        """The score of one (prompt, response); whatever goes wrong is a Failure."""
        if self._state in ("closed", "failed"):
            return Failure("unreachable", self.health())
        if (failure := self._condemned((prompt, response, finished))) is not None:
            return failure
        number = next(self._numbers)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        alone = (prompt, response, finished) in self._deaths
        pending = _Pending(Ask(number=number, prompt=prompt, response=response, finished=finished, alone=alone), answer)
        try:
            if self._state == "ready":
                self._send(pending.ask)
            self._pending[number] = pending
            async with asyncio.timeout(timeout_s):
                return await answer
        except UnicodeEncodeError as error:
            return Failure("malformed", f"the text is not Unicode: {error.reason} at character {error.start}")
        except TimeoutError:
            return Failure("timeout", f"the model process had no answer within {timeout_s} s")
        finally:
            if self._pending.pop(number, None) is not None and number in self._owed and self._channel is not None:
                self._channel.send(frame(Drop(number=number)))

    async def _live(self) -> None:
        """Run one process after another, until cancelled."""
        pause_s = 0.0
        while True:
            self._owed.clear()
            self._computing.clear()
            self._num_answers = 0
            try:
                await self._run_once()
            except DeathError as death:
                log.error("model_process_ended", why=str(death), state=self._state)
                self._bury(death)
            self._settled.set()
            # one that has worked is started again at once
            pause_s = 0.0 if self._num_answers else min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)
            self._state = "loading"

    async def _run_once(self) -> None:
        """One process from its start to its end.

        Raises:
            DeathError: how it ended; always.
        """
        channel = self._channel = await open_channel(self._models)
        try:
            await self._load(channel)
            await self._serve(channel)
        finally:
            self._channel = None
            await channel.close()

    async def _load(self, channel: Channel) -> None:
        """Wait for the models, then send what waits.

        Raises:
            DeathError: they cannot be loaded, take too long, or are not those of the first time.
        """
        try:
            async with asyncio.timeout(self._load_timeout_s):
                message = await channel.receive()
        except TimeoutError:
            raise DeathError(f"its models were not loaded within {self._load_timeout_s} s", "timeout") from None
        if isinstance(message, LoadFailed):
            raise DeathError(message.detail)
        assert isinstance(message, Loaded)
        if self._digest not in ("", message.digest):  # the version that goes with scores would be wrong
            raise DeathError("the files of its models have changed since they were first loaded; restart the service")
        self._digest = message.digest
        self._state = "ready"
        self._settled.set()
        log.info("model_process", pid=channel.pid, digest=message.digest, waiting=len(self._pending))
        for pending in self._pending.values():
            if not pending.answer.done():
                self._send(pending.ask)

    async def _serve(self, channel: Channel) -> None:
        """Take what the process says until it dies.

        Raises:
            DeathError: always.
        """
        watch = asyncio.create_task(self._watch(channel), name="model-process-watch")
        try:
            while True:
                message = await channel.receive()
                self._sign_s = asyncio.get_running_loop().time()
                if isinstance(message, Began):
                    self._computing.update(message.numbers)
                elif isinstance(message, Answer):
                    self._take(message)
        finally:
            watch.cancel()

    async def _watch(self, channel: Channel) -> None:
        """Kill the process when it owes answers and says nothing for too long."""
        loop = asyncio.get_running_loop()
        while True:
            silent_s = loop.time() - self._sign_s if self._owed else 0.0
            if silent_s >= self._batch_timeout_s:
                verdict = f"a batch took longer than {self._batch_timeout_s} s, so that the process was killed"
                return channel.condemn(DeathError(verdict, "timeout"))
            await asyncio.sleep(self._batch_timeout_s - silent_s)

    def _send(self, ask: Ask) -> None:
        assert self._channel is not None
        self._channel.send(frame(ask))
        if not self._owed:
            self._sign_s = asyncio.get_running_loop().time()
        self._owed[ask.number] = ask

    def _take(self, answer: Answer) -> None:
        self._num_answers += 1
        self._deaths.pop(_text_of(self._owed.pop(answer.number)), None)
        self._computing.discard(answer.number)
        pending = self._pending.get(answer.number)
        if pending is None or pending.answer.done():
            return
        if answer.value is not None:
            pending.answer.set_result(answer.value)
        else:
            pending.answer.set_result(Failure(answer.reason or "exception", answer.detail))

    def _bury(self, death: DeathError) -> None:
        """The process is dead: decide for every ask what becomes of it."""
        self._trouble = str(death)
        if self._state != "ready":
            self._state = "failed"
            self._fail_all(Failure("unreachable", self.health()))
            return
        self._state = "loading"
        suspects = [self._owed[number] for number in self._computing or self._owed]
        for text in {_text_of(ask) for ask in suspects}:
            self._deaths.setdefault(text, []).append(death)
        while len(self._deaths) > MAX_SUSPECTS:
            del self._deaths[next(iter(self._deaths))]
        for ask in suspects:
            pending = self._pending.get(ask.number)
            if pending is None or pending.answer.done():
                continue
            pending.ask = msgspec.structs.replace(ask, alone=True)
            if (failure := self._condemned(_text_of(ask))) is not None:
                pending.answer.set_result(failure)

    def _condemned(self, text: _Text) -> Failure | None:
        """The failure of a text that has had its second chance. Who asks once more after that begins anew."""
        deaths = self._deaths.get(text, [])
        if len(deaths) < MAX_ATTEMPTS:
            return None
        del self._deaths[text]
        return Failure(deaths[-1].reason, f"the model process failed on this twice: {deaths[-1]}")

    def _fail_all(self, failure: Failure) -> None:
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_result(failure)


def _text_of(ask: Ask) -> _Text:
    return ask.prompt, ask.response, ask.finished


class ModelPool:
    """The model processes of a service: scorers that need the same set of models share one."""

    def __init__(self) -> None:
        self._processes: dict[tuple[ModelSet, float, float], ModelProcess] = {}

    def process(self, models: ModelSet, *, load_timeout_s: float, batch_timeout_s: float) -> ModelProcess:
        """The process of a set of models; it is not started here."""
        key = models, load_timeout_s, batch_timeout_s
        if key not in self._processes:
            self._processes[key] = ModelProcess(models, load_timeout_s=load_timeout_s, batch_timeout_s=batch_timeout_s)
        return self._processes[key]
