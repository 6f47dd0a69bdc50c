"""`python -m tba_reward.process_pool.worker_main FD MEMORY_BYTES SERVICE_PID`: a guard and its child, the worker.

The worker loads rules and applies them, until its socket closes. The guard ends when the worker ends, on SIGTERM from
the service, or when the service is gone (Linux). It first kills all processes that the worker has started, in any
process group, because orphans among them become its children (Linux). It exits as the worker did.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tba.plugins import import_object
from tba_reward.child_messages import ItemMessage, LoadRule, Reply, ScoreItems, frame, read_frame
from tba_reward.scorer import Failure, Item, Outcome, Params, clean, exception_text, outcome_of

EXIT_OUT_OF_MEMORY = 97
"""Exit code of a worker that has reached its memory limit."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_S = 10.0
"""Seconds after which the guard gives up on processes that it may not kill, or that hang in the kernel."""
_GUARDED = {signal.SIGTERM, signal.SIGCHLD}
_DECODER = msgspec.msgpack.Decoder(LoadRule | ScoreItems)
LoadedRule = tuple[Callable[..., Any], Params, bool]
"""The function, its params, and whether it takes a list of items."""


def serve(connection: socket.socket) -> None:
    """Answer the service's messages in order until it closes the connection. Exit the process if memory runs out."""
    rules, own_pid = dict[int, LoadedRule](), os.getpid()
    with connection.makefile("rb") as stream:
        while (body := read_frame(stream)) is not None:
            message = _DECODER.decode(body)
            try:
                for outcomes in _replies(message, rules):
                    # a rule may fork and come back in both processes: only the first one answers
                    if os.getpid() != own_pid:
                        os._exit(0)
                    # an item has exhausted the memory, which is given back with the process
                    if any(isinstance(each, Failure) and each.reason == "out_of_memory" for each in outcomes):
                        raise MemoryError
                    sendable: list[Outcome] = [
                        Failure(each.reason, clean(each.detail)) if isinstance(each, Failure) else each
                        for each in outcomes
                    ]
                    connection.sendall(frame(Reply(message.number, sendable, time.process_time(), own_pid)))
            except MemoryError:
                os._exit(EXIT_OUT_OF_MEMORY)


def _replies(message: LoadRule | ScoreItems, rules: dict[int, LoadedRule]) -> Iterator[list[Outcome]]:
    """Handle a message, and yield a list of outcomes for each Reply: for a load, for a batch, or for each item."""
    if isinstance(message, LoadRule):
        outcome: Outcome = 1.0
        try:
            params = json.loads(message.params_json)
            rule = find(message.function)
            if message.prepare is not None:
                find(message.prepare)(params)
            rules[message.rule] = (rule, params, message.is_batch)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # foreign code may raise anything; it is reported
            outcome = Failure("exception", f"{message.function} could not be loaded: {exception_text(error)}")
        yield [outcome]
        return
    rule, params, is_batch = rules[message.rule]
    if is_batch:
        yield rule([_item(item) for item in message.items], params)
        return
    for item in message.items:
        yield [outcome_of(rule, _item(item), params)]


def find(name: str) -> Callable[..., Any]:
    """Return the function that `module:name` names.

    Raises:
        ValueError: it is not a function. The import of the module may raise any other exception.
    """
    found = import_object(name)
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__} and not a function")
    return found


def _item(message: ItemMessage) -> Item:
    return Item(
        prompt=message.prompt,
        response=message.response,
        data=json.loads(message.data_json),
        finish_reason=message.finish_reason,
        response_tokens=message.response_tokens,
    )


def main() -> None:
    """Fork the worker, which serves the socket that argv names, and guard it. Both exit here and do not return."""
    connection, max_memory_bytes, service = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    connection.set_inheritable(False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, _GUARDED)
    guard, worker = os.getpid(), os.fork()
    if worker:
        connection.close()  # its end is the worker's alone
        _guard(worker, service)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    os.setsid()
    # programs that a rule starts must be terminable
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GUARDED)
    if max_memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(BrokenPipeError, ConnectionResetError):
        serve(connection)
    # what a rule has started, threads that do not end too, must not keep the process
    os._exit(0)


def _guard(worker: int, service: int) -> NoReturn:
    """Wait until the worker or the service ends, or SIGTERM comes; then kill all descendants and exit as the worker."""
    status = None
    # the service may be gone since before its death would have been told
    while status is None and os.getppid() == service and signal.sigwait(_GUARDED) == signal.SIGCHLD:
        while (ended := _reap()) is not None and ended[0]:
            status = ended[1] if ended[0] == worker else status
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    until_s = time.monotonic() + _KILL_S
    while (ended := _reap()) is not None and time.monotonic() < until_s:
        status = ended[1] if ended[0] == worker else status
        if ended[0] == 0:
            # theirs become children when they are gone
            with suppress(OSError):  # Linux only
                for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split():
                    with suppress(OSError):
                        os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.002)
    if ended is not None:
        print(f"processes of a scorer are still there after {_KILL_S:g} s of SIGKILL", file=sys.stderr, flush=True)
    code = os.waitstatus_to_exitcode(status) if status is not None else 1
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _reap() -> tuple[int, int] | None:
    """Return (pid, status) of a child that has ended, (0, 0) if none has ended, or None if there is no child."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # Linux only; it may be forbidden
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
