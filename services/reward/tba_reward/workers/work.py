"""The life of a worker process: a message in, a reply out, in order, until the socket ends."""

from __future__ import annotations

import os
import socket

import msgspec

from tba_reward.scorers.base import Failure, clean
from tba_reward.workers.messages import Frames, Prepare, Reply, ToWorker, encode
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
            if reply.reason == "out_of_memory":
                os._exit(EXIT_OUT_OF_MEMORY)
            connection.sendall(encode(reply))


def _reply(message: ToWorker, table: RuleTable) -> Reply:
    if isinstance(message, Prepare):
        try:
            error = table.prepare(message)
        except MemoryError:
            return Reply(message.number, reason="out_of_memory")
        if error is None:
            return Reply(message.number)
        return Reply(message.number, reason="exception", detail=clean(error))
    outcome = table.outcome(message)
    if isinstance(outcome, Failure):
        return Reply(message.number, reason=outcome.reason, detail=clean(outcome.detail))
    return Reply(message.number, score=outcome)
