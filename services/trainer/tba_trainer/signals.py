"""SIGTERM and SIGINT as an event. Before that, while a trainer starts, they end it at once (tba/starting.py).

A signal handler runs in the middle of whatever the main thread does, possibly while it holds the lock of a logger or of
an event. So the handler itself does nothing: Python writes the signal's number to a socket, and a thread that may wait
for locks reads it there.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tba.logs import get_logger
from tba.starting import SIGNALS

log = get_logger("signals")


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set the event, and do nothing else; in another thread than the main one, which signals do not
    reach, the block changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # a handler must never block

    def listen() -> None:
        while data := reader.recv(1):
            log.info("signal", name=signal.Signals(data[0]).name)
            stop.set()

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        writer.close()  # ends the listener
        listener.join()
        reader.close()
