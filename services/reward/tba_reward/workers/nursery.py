"""`python -m tba_reward.workers.nursery FD MEMORY_BYTES`: forks workers, kills them, says what became of them.

One process without threads. It loads what all workers need once, so that a worker that takes the place of a killed one
is there in milliseconds (importing sympy takes seconds). Each worker leads a process group of its own; when it ends,
whatever it has started ends with it. When the service goes, its end of the socket closes, and everything here ends too.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from tba_reward.scorers.base import clean
from tba_reward.workers.messages import Exited, Fork, Forked, Frames, Ready, Share, Shared, ToNursery, encode
from tba_reward.workers.table import RuleTable
from tba_reward.workers.work import work

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_FDS = 64
_DECODER = msgspec.msgpack.Decoder(ToNursery)


class Nursery:
    """Serves one service.

    Args:
        control: the socket to the service.
        max_memory_bytes: address space of one worker; 0: no bound.
    """

    def __init__(self, control: socket.socket, max_memory_bytes: int) -> None:
        self._control, self._max_memory_bytes = control, max_memory_bytes
        self._table = RuleTable()
        self._pids: dict[int, int] = {}
        """Pids by worker."""
        self._fds: list[int] = []
        self._wake_in, self._wake_out = socket.socketpair()

    def run(self) -> None:
        """Serve until the service hangs up."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a worker's children leave behind comes to us
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_in.fileno())
        self._say(Ready())
        frames = Frames()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake_out:
                        with suppress(BlockingIOError):
                            self._wake_out.recv(4096)
                        continue
                    data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, _MAX_FDS)
                    self._fds += fds
                    if not data:
                        return
                    for body in frames.feed(data):
                        self._take(_DECODER.decode(body))
                self._reap()

    def end(self) -> None:
        """Kill whatever is left, and see it gone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pid in self._pids.values():
            _kill_group(pid)
        for pid in self._pids.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids.clear()
        self._kill_strays()

    def _take(self, message: ToNursery) -> None:
        if isinstance(message, Share):
            try:
                error = self._table.prepare(message)
            except MemoryError as failure:
                error = f"MemoryError: {failure}"
            gc.collect()
            gc.freeze()  # what is shared stays shared: the collector of a worker does not write to it
            self._say(Shared(message.rule, None if error is None else clean(error)))
        elif isinstance(message, Fork):
            self._fork(message.worker, self._fds.pop(0))
        elif (pid := self._pids.get(message.worker)) is not None:
            _kill_group(pid)

    def _fork(self, worker: int, fd: int) -> None:
        nursery = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes: the pool tries again
            os.close(fd)
            self._say(Exited(worker, None))
            return
        if pid == 0:
            _be_worker(self, fd, nursery)
        with suppress(OSError):  # both sides do it: whoever comes first
            os.setpgid(pid, pid)
        os.close(fd)
        self._pids[worker] = pid
        self._say(Forked(worker, pid))

    def close_in_worker(self) -> None:
        """A worker keeps nothing of the nursery's connections."""
        signal.set_wakeup_fd(-1)
        for each in (self._control, self._wake_in, self._wake_out):
            each.close()

    def serve_as_worker(self, fd: int) -> None:
        """What a worker does all its life."""
        if self._max_memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (self._max_memory_bytes, self._max_memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        work(socket.socket(fileno=fd), self._table)

    def _reap(self) -> None:
        """Everything that has ended; the group of a worker ends before its pid is free again."""
        workers = {pid: worker for worker, pid in self._pids.items()}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            worker = workers.get(pid)
            if worker is not None:
                _kill_group(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if worker is not None:
                del self._pids[worker]
                self._kill_strays()
                self._say(Exited(worker, code))

    def _kill_strays(self) -> None:
        """Kill children that are no workers: what a dead worker had started outside its group."""
        known = set(self._pids.values())
        with suppress(OSError):
            for text in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                if int(text) not in known:
                    with suppress(ProcessLookupError):
                        os.kill(int(text), signal.SIGKILL)

    def _say(self, message: msgspec.Struct) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next read ends us
            self._control.sendall(encode(message))


def _be_worker(nursery: Nursery, fd: int, nursery_pid: int) -> None:
    """Never returns: the code of the nursery must not run on in a worker."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery_pid:
            nursery.close_in_worker()
            nursery.serve_as_worker(fd)
            code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0
    except BaseException as error:  # whatever it is, only the exit code may leave
        with suppress(Exception):
            sys.stderr.write(f"reward worker {os.getpid()}: {type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group may not exist yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere, or where it is forbidden, the process groups alone have to do."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main() -> None:
    """Serve the service that holds the other end of the socket."""
    nursery = Nursery(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    try:
        nursery.run()
    except ConnectionResetError:
        return
    finally:
        nursery.end()


if __name__ == "__main__":
    main()
