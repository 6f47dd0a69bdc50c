"""The main loop of a worker process, and the rules that a worker or the fork server has loaded."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tba.plugins import import_object
from tba_reward.process_pool.pool_messages import (
    FrameDecoder,
    ItemMessage,
    LoadRule,
    OutcomeMessage,
    PreloadRule,
    Reply,
    ScoreItems,
    ToWorker,
    encode,
)
from tba_reward.scorer import BatchRule, Failure, Item, Outcome, Params, Rule, clean, outcome_of

EXIT_OUT_OF_MEMORY = 97
"""Exit code of a worker that has reached its bound of memory."""
_READ_BYTES = 1 << 16
_DECODER = msgspec.msgpack.Decoder(ToWorker)


class LoadedRules:
    """Rules by their number."""

    def __init__(self) -> None:
        self._rules: dict[int, tuple[BatchRule, Params]] = {}
        self._errors: dict[int, str] = {}

    def load(self, message: LoadRule | PreloadRule) -> str | None:
        """Import a rule and call its `prepare` function. Return None, or the error as a sentence.

        Raises:
            MemoryError: the process has reached its bound of memory.
        """
        self._errors.pop(message.rule, None)
        try:
            params = json.loads(message.params_json)
            rule = find(message.function)
            if message.prepare is not None:
                find(message.prepare)(params)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # foreign code may raise anything; it is reported
            self._errors[message.rule] = f"{message.function} could not be loaded: {type(error).__name__}: {error}"
            return self._errors[message.rule]
        is_batch = isinstance(message, LoadRule) and message.is_batch  # no rule that is preloaded takes batches
        self._rules[message.rule] = (rule if is_batch else _one_by_one(rule), params)
        return None

    def score(self, message: ScoreItems) -> list[Outcome]:
        """Apply a rule to items: one outcome each, in order."""
        found = self._rules.get(message.rule)
        if found is None:
            error = self._errors.get(message.rule, "its rule was not loaded")
            return [Failure("exception", error)] * len(message.items)
        rule, params = found
        return rule([_item(item) for item in message.items], params)


def worker_main(connection: socket.socket, rules: LoadedRules) -> None:
    """Answer messages in order until the other side hangs up."""
    # `tba run` has it blocked in the service, and programs that a rule starts must be terminable
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    frames, own_pid = FrameDecoder(), os.getpid()
    while data := connection.recv(_READ_BYTES):
        for body in frames.feed(data):
            reply = _reply(_DECODER.decode(body), rules)
            # a rule may fork and come back in both processes: only the first one answers
            if os.getpid() != own_pid:
                os._exit(0)
            # the memory that it holds is given back with the process
            if any(outcome.reason == "out_of_memory" for outcome in reply.outcomes):
                os._exit(EXIT_OUT_OF_MEMORY)
            connection.sendall(encode(msgspec.structs.replace(reply, cpu_s=time.process_time())))


def find(name: str) -> Callable[..., Any]:
    """Return the function that `module:name` names.

    Raises:
        ValueError: there is no such function; or whatever the import of the module raises.
    """
    found = import_object(name)
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__} and not a function")
    return found


def _one_by_one(rule: Rule) -> BatchRule:
    return lambda items, params: [outcome_of(rule, item, params) for item in items]


def _item(message: ItemMessage) -> Item:
    return Item(
        prompt=message.prompt,
        response=message.response,
        data=json.loads(message.data_json),
        finish_reason=message.finish_reason,
        response_tokens=message.response_tokens,
    )


def _reply(message: ToWorker, rules: LoadedRules) -> Reply:
    try:
        if isinstance(message, LoadRule):
            error = rules.load(message)
            outcomes: list[Outcome] = [1.0 if error is None else Failure("exception", error)]
        else:
            outcomes = rules.score(message)
    except MemoryError:
        return Reply(message.number, [OutcomeMessage(reason="out_of_memory")])
    return Reply(message.number, [_outcome_message(outcome) for outcome in outcomes])


def _outcome_message(outcome: Outcome) -> OutcomeMessage:
    if isinstance(outcome, Failure):
        return OutcomeMessage(reason=outcome.reason, detail=clean(outcome.detail))
    return OutcomeMessage(score=outcome)
