"""The life of a worker process: a message in, a reply out, in order, until the socket ends."""

from __future__ import annotations

import os
import socket
import time

import msgspec

from tba_reward.scorers.base import Failure, Outcome, clean
from tba_reward.workers.messages import Frames, OutcomeMessage, Prepare, Reply, ToWorker, encode
from tba_reward.workers.table import RuleTable

EXIT_OUT_OF_MEMORY = 97
"""How a worker ends that has reached its bound of memory: what it holds is given back with the process."""
_READ_BYTES = 1 << 16
_DECODER = msgspec.msgpack.Decoder(ToWorker)


def work(connection: socket.socket, table: RuleTable) -> None:
    """Serve until the other side hangs up."""
    frames, own_pid = Frames(), os.getpid()
    while data := connection.recv(_READ_BYTES):
        for body in frames.feed(data):
            reply = _reply(_DECODER.decode(body), table)
            if os.getpid() != own_pid:
                os._exit(0)  # a rule has forked and come back twice: only the first one answers
            if any(outcome.reason == "out_of_memory" for outcome in reply.outcomes):
                os._exit(EXIT_OUT_OF_MEMORY)
            connection.sendall(encode(msgspec.structs.replace(reply, cpu_s=time.process_time())))


def _reply(message: ToWorker, table: RuleTable) -> Reply:
    try:
        if isinstance(message, Prepare):
            error = table.prepare(message)
            outcomes: list[Outcome] = [1.0 if error is None else Failure("exception", error)]
        else:
            outcomes = table.outcomes(message)
    except MemoryError:
        return Reply(message.number, [OutcomeMessage(reason="out_of_memory")])
    return Reply(message.number, [_said(outcome) for outcome in outcomes])


def _said(outcome: Outcome) -> OutcomeMessage:
    if isinstance(outcome, Failure):
        return OutcomeMessage(reason=outcome.reason, detail=clean(outcome.detail))
    return OutcomeMessage(score=outcome)
