"""A model process: `python -m tba_reward.model_server.child SPEC` (JSON), started by `tba_reward.model_server.client`.

    stdin --> reader thread --> inbox --> main thread: tokenize, wait a little for more, cut batches, compute --> stdout

It ends at once when its stdin ends, so that it never outlives the service.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from functools import partial
from typing import BinaryIO

import msgspec

from tba_reward.child_messages import FromModels, Loaded, LoadFailed, ToModels, frame, read_frame

Inbox = queue.SimpleQueue[ToModels]


def main() -> int:
    """Load the models of the spec, then answer requests until stdin ends; return 1 if the models cannot be loaded."""
    # the frames alone use the pipes: a library that prints writes to stderr from now on
    pipe_in, pipe_out = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # a fork that outlives this process must not hold the pipes open: their end is how the service hears of a death
    os.register_at_fork(after_in_child=lambda: (os.close(pipe_in), os.close(pipe_out)))
    frames, out = os.fdopen(pipe_in, "rb"), os.fdopen(pipe_out, "wb")
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(frames, inbox), daemon=True).start()

    # imported only now, with the reader running, so that the process ends with the service even while it imports
    import torch
    from pydantic import TypeAdapter
    from transformers.utils import logging

    from tba.config.reward import AnyScorerSpec, ModelScorerSpec
    from tba_reward.model_server.child.judges import load_judge
    from tba_reward.model_server.child.model_loader import LoadError
    from tba_reward.model_server.child.server import Batcher

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    spec = TypeAdapter[AnyScorerSpec](AnyScorerSpec).validate_json(sys.argv[1])
    assert isinstance(spec, ModelScorerSpec)
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    try:
        judge = load_judge(spec)
    except Exception as error:  # transformers may raise anything on files that are damaged or of another kind
        kind = "" if isinstance(error, LoadError) else f"{type(error).__name__}: "
        _send(out, LoadFailed(detail=f"{kind}{error}"[:1000]))
        return 1
    _send(out, Loaded(digest=judge.digest))
    batcher = Batcher(judge, spec.batch_tokens, partial(_send, out))
    while True:
        batcher.take(inbox.get())
        deadline_s = time.monotonic() + spec.batch_wait_s
        while not batcher.is_full:
            try:
                batcher.take(inbox.get(timeout=max(deadline_s - time.monotonic(), 0)))
            except queue.Empty:
                break
        batcher.compute()


def _read(frames: BinaryIO, inbox: Inbox) -> None:
    """Put the service's messages into the inbox; exit the process at once when stdin ends."""
    decoder = msgspec.msgpack.Decoder(ToModels)
    while (body := read_frame(frames)) is not None:
        inbox.put(decoder.decode(body))
    os._exit(0)  # not sys.exit: it would wait for what the main thread computes


def _send(out: BinaryIO, message: FromModels) -> None:
    out.write(frame(message))
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
