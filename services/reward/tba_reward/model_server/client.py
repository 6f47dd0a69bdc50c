"""The model processes as the service sees them: send requests, watch the process, kill it, start it again.

    loading --> ready --> loading (it died or hung) ...
        `-----> failed (a sentence) --> loading, a while later

A request waits for its answer until its own deadline. The process has `load_timeout_s` to load its models. While it
owes answers, it must send a message (a batch has started, an answer) every `batch_timeout_s`. Otherwise it is killed
with all processes that it has started. When it dies, the texts of the batch that it computed are the suspects. Each is
sent once more, in a batch of its own, so that the next death has one culprit. All other requests are simply sent again.
A suspect is remembered even if its request is cancelled: a later request for the same text is its second attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from dataclasses import dataclass
from typing import Literal

import msgspec

from tba.api.scores import ScoreReason
from tba.config.reward import ModelScorerSpec
from tba.logs import get_logger
from tba_reward.child_messages import (
    LENGTH,
    BatchStarted,
    CancelRequest,
    FromModels,
    Loaded,
    LoadFailed,
    ScoreAnswer,
    ScoreRequest,
    describe_exit,
    frame,
)
from tba_reward.scorer import Failure, Outcome

MAX_ATTEMPTS = 2
MAX_SUSPECTS = 4096
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
_ENVIRONMENT = {
    "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers would ask the hub for other files in a thread
    "TOKENIZERS_PARALLELISM": "false",
}
log = get_logger("models")

_Text = tuple[str, str, bool]


class ModelPool:
    """The model processes of a service: scorers that need the same models share one."""

    def __init__(self) -> None:
        self._processes: dict[str, ModelProcess] = {}

    def process(self, spec: ModelScorerSpec, *, load_timeout_s: float) -> ModelProcess:
        """Return the process for a scorer's models, started or not; scorers with the same models share it."""
        if spec.models_key not in self._processes:
            self._processes[spec.models_key] = ModelProcess(spec, load_timeout_s=load_timeout_s)
        return self._processes[spec.models_key]


class ProcessDiedError(Exception):
    """The model process has ended or must be killed. `reason`: the reason of the Failure that its requests get."""

    def __init__(self, message: str, reason: ScoreReason = "crashed") -> None:
        super().__init__(message)
        self.reason: ScoreReason = reason


@dataclass(slots=True)
class _Pending:
    """A request that somebody waits for."""

    request: ScoreRequest
    outcome: asyncio.Future[Outcome]


class ModelProcess:
    """A child process that holds the models of a scorer; all scorers that need the same models share it."""

    def __init__(self, spec: ModelScorerSpec, *, load_timeout_s: float) -> None:
        self._spec = spec
        self._load_timeout_s, self._batch_timeout_s = load_timeout_s, spec.batch_timeout_s
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._in_flight: dict[int, ScoreRequest] = {}
        """Requests that were sent to the current process and are not answered yet."""
        self._computing: set[int] = set()
        """Requests in flight whose batch has started."""
        self._suspects: dict[_Text, list[ProcessDiedError]] = {}
        """For each text the deaths of the processes that computed it; the oldest suspect first."""
        self._last_message_s = 0.0
        """Event loop time of the process's last message, or of the request that ended its idle time, if later."""
        self._state: Literal["closed", "loading", "ready", "failed"] = "closed"
        self._problem = "it was not started"
        self._settled = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._child: ChildProcess | None = None
        self.digest = ""
        """SHA-256 of the files of the models; empty until the first load, and never changed after it."""
        self._num_answers = 0
        """Number of answers from the current process."""

    @property
    def pid(self) -> int | None:
        """Process id of the current process; None if none runs."""
        return None if self._child is None else self._child.pid

    def health(self) -> str:
        """Return `ok`, or a sentence that says what is wrong."""
        return "ok" if self._state == "ready" else f"the model process does not answer: {self._problem}"

    async def start(self) -> None:
        """Start the process if it was not started, and wait until its models are loaded or the first attempt failed."""
        if self._supervisor is None:
            self._state, self._problem = "loading", "its models are being loaded"
            self._supervisor = asyncio.create_task(self._supervise(), name="model-process")
        await self._settled.wait()

    async def close(self) -> None:
        """Kill the process; requests without an answer become failures."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervisor
        self._state, self._problem = "closed", "it was closed"
        self._settled.clear()
        self._fail_all(Failure("crashed", self.health()))

    async def score(self, prompt: str, response: str, *, finished: bool = True, timeout_s: float) -> Outcome:
        """Return the score of one (prompt, response); every error is a Failure."""
        # nobody waits for models that cannot be loaded: the buffer asks for these items later
        if self._state in ("closed", "failed"):
            return Failure("unreachable", self.health())
        text = (prompt, response, finished)
        if (failure := self._repeated_failure(text)) is not None:
            return failure
        number = next(self._numbers)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        request = ScoreRequest(
            number=number, prompt=prompt, response=response, finished=finished, alone=text in self._suspects
        )
        pending = _Pending(request, outcome)
        try:
            if self._state == "ready":
                self._send(pending.request)
            self._pending[number] = pending
            async with asyncio.timeout(timeout_s):
                return await outcome
        except UnicodeEncodeError as error:
            return Failure("malformed", f"the text is not Unicode: {error.reason} at character {error.start}")
        except TimeoutError:
            return Failure("timeout", f"the model process did not answer within {timeout_s} s")
        finally:
            if self._pending.pop(number, None) is not None and number in self._in_flight and self._child is not None:
                self._child.send(frame(CancelRequest(number=number)))

    async def _supervise(self) -> None:
        """Start the process, and start it again each time that it ends, until cancelled."""
        pause_s = 0.0
        while True:
            self._in_flight.clear()
            self._computing.clear()
            self._num_answers = 0
            try:
                try:
                    process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "tba_reward.model_server.child", self._spec.model_dump_json()),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        env={**os.environ, **_ENVIRONMENT},
                        start_new_session=True,  # a process group of its own, so that what it starts is killed with it
                    )
                except OSError as error:
                    raise ProcessDiedError(f"it cannot be started ({error})") from error
                child = self._child = ChildProcess(process)
                try:
                    await self._load(child)
                    await self._serve(child)
                finally:
                    self._child = None
                    await child.close()
            except ProcessDiedError as death:
                log.error("model_process_ended", why=str(death), state=self._state)
                self._on_death(death)
            self._settled.set()
            # a process that has answered is started again at once
            pause_s = 0.0 if self._num_answers else min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)
            self._state = "loading"

    async def _load(self, child: ChildProcess) -> None:
        """Wait until the process has loaded its models, then send it the waiting requests.

        Raises:
            ProcessDiedError: the models cannot be loaded, take too long, or their files changed since the first load.
        """
        try:
            async with asyncio.timeout(self._load_timeout_s):
                message = await child.receive()
        except TimeoutError:
            raise ProcessDiedError(f"its models were not loaded within {self._load_timeout_s} s", "timeout") from None
        if isinstance(message, LoadFailed):
            raise ProcessDiedError(message.detail)
        assert isinstance(message, Loaded)
        # the digest is part of the version of scores, which is final once the scorer has started
        if self.digest not in ("", message.digest):
            raise ProcessDiedError(
                "the files of its models have changed since they were first loaded; restart the service"
            )
        self.digest = message.digest
        self._state = "ready"
        self._settled.set()
        log.info("model_process", pid=child.pid, digest=message.digest, waiting=len(self._pending))
        for pending in self._pending.values():
            if not pending.outcome.done():
                self._send(pending.request)

    async def _serve(self, child: ChildProcess) -> None:
        """Handle the messages of the process until it dies, which raises ProcessDiedError."""
        watch = asyncio.create_task(self._watch(child), name="model-process-watch")
        try:
            while True:
                message = await child.receive()
                self._last_message_s = asyncio.get_running_loop().time()
                if isinstance(message, BatchStarted):
                    self._computing.update(message.numbers)
                elif isinstance(message, ScoreAnswer):
                    self._num_answers += 1
                    # it was computed, so that it is no suspect any more
                    self._suspects.pop(_text_of(self._in_flight.pop(message.number)), None)
                    self._computing.discard(message.number)
                    pending = self._pending.get(message.number)
                    if pending is not None and not pending.outcome.done():
                        pending.outcome.set_result(message.outcome)
        finally:
            watch.cancel()

    async def _watch(self, child: ChildProcess) -> None:
        """Kill the process when it owes answers and has sent no message for `batch_timeout_s`."""
        loop = asyncio.get_running_loop()
        while True:
            silent_s = loop.time() - self._last_message_s if self._in_flight else 0.0
            if silent_s >= self._batch_timeout_s:
                cause = f"a batch took longer than {self._batch_timeout_s} s, so the process was killed"
                return child.kill(ProcessDiedError(cause, "timeout"))
            await asyncio.sleep(self._batch_timeout_s - silent_s)

    def _send(self, request: ScoreRequest) -> None:
        assert self._child is not None
        self._child.send(frame(request))
        # the silence before the first request in flight does not count
        if not self._in_flight:
            self._last_message_s = asyncio.get_running_loop().time()
        self._in_flight[request.number] = request

    def _on_death(self, death: ProcessDiedError) -> None:
        """Keep requests for the next process, but fail those over which two have died; fail all if it died loading."""
        self._problem = str(death)
        if self._state != "ready":
            self._state = "failed"
            self._fail_all(Failure("unreachable", self.health()))
            return
        self._state = "loading"
        # no batch had started: the process died over one of the requests that it tokenized
        suspects = [self._in_flight[number] for number in self._computing or self._in_flight]
        for text in {_text_of(request) for request in suspects}:
            self._suspects.setdefault(text, []).append(death)
        while len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        for request in suspects:
            pending = self._pending.get(request.number)
            if pending is None or pending.outcome.done():
                continue
            # the next death then has one culprit
            pending.request = msgspec.structs.replace(request, alone=True)
            if (failure := self._repeated_failure(_text_of(request))) is not None:
                pending.outcome.set_result(failure)

    def _repeated_failure(self, text: _Text) -> Failure | None:
        """Return a Failure if MAX_ATTEMPTS processes have died over this text, and forget those deaths; else None."""
        deaths = self._suspects.get(text, [])
        if len(deaths) < MAX_ATTEMPTS:
            return None
        del self._suspects[text]
        return Failure(deaths[-1].reason, f"the model process failed on this twice: {deaths[-1]}")

    def _fail_all(self, failure: Failure) -> None:
        for pending in self._pending.values():
            if not pending.outcome.done():
                pending.outcome.set_result(failure)


class ChildProcess:
    """One process and the two pipes to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._cause: ProcessDiedError | None = None

    @property
    def pid(self) -> int:
        """Process id, which is also the process group id of everything that it starts."""
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Write a frame to the process. This does not raise when the process is gone; `receive` does."""
        self._stdin.write(message)

    async def receive(self) -> FromModels:
        """Return the next message; raise ProcessDiedError if the process has ended or the message is invalid."""
        try:
            length = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))[0]
            return msgspec.msgpack.decode(await self._stdout.readexactly(length), type=FromModels)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._stdin.close()  # asyncio's wait() waits for the pipes, too
            code = await self._process.wait()
            raise self._cause or ProcessDiedError(f"it ended: {describe_exit(code)}") from None
        except msgspec.MsgspecError as error:
            raise ProcessDiedError(f"it sent an invalid message ({error})") from error

    def kill(self, cause: ProcessDiedError) -> None:
        """Kill the process and its process group; `receive` then raises `cause`."""
        self._cause = cause
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process if it still runs, and wait until it is gone."""
        self.kill(self._cause or ProcessDiedError("it was closed"))
        self._stdin.close()
        while await self._stdout.read(2**16):  # to its end: only then does asyncio let the pipe go
            pass
        await self._process.wait()


def _text_of(request: ScoreRequest) -> _Text:
    return request.prompt, request.response, request.finished
