"""`python -m tba_reward.process_pool.fork_server FD MEMORY_BYTES`: forks workers, kills them, reports their exits.

One process without threads, like the one of multiprocessing's `forkserver`. It loads what all workers need once, so
that the replacement of a killed worker is there in milliseconds (importing sympy takes seconds). Each worker leads a
process group of its own; when it ends, everything that it has started ends with it. When the service goes, its end of
the socket closes, and everything here ends too.
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

from tba_reward.process_pool.pool_messages import (
    ForkWorker,
    FrameDecoder,
    PreloadRule,
    RulePreloaded,
    ServerReady,
    ToForkServer,
    WorkerExited,
    WorkerForked,
    encode,
)
from tba_reward.process_pool.worker_main import LoadedRules, worker_main
from tba_reward.scorer import clean

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_FDS = 64
_DECODER = msgspec.msgpack.Decoder(ToForkServer)


class ForkServer:
    """Serves one service.

    Args:
        control: the socket to the service.
        max_memory_bytes: address space of one worker; 0: no bound.
    """

    def __init__(self, control: socket.socket, max_memory_bytes: int) -> None:
        self._control, self._max_memory_bytes = control, max_memory_bytes
        self._rules = LoadedRules()
        self._pids: dict[int, int] = {}
        """Pids by worker."""
        self._fds: list[int] = []
        """Sockets that came with orders and are not given to a worker yet."""
        self._wake_in, self._wake_out = socket.socketpair()

    def run(self) -> None:
        """Serve until the service hangs up."""
        # a daemon that a worker has started becomes our child when the worker dies, so that we can kill it
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        # a handler has to be there, or the wake-up descriptor gets nothing for this signal
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_in.fileno())
        self._send(ServerReady())
        frames = FrameDecoder()
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
                        self._handle(_DECODER.decode(body))
                self._reap()

    def stop(self) -> None:
        """Kill all workers and their children, and wait until they are gone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pid in self._pids.values():
            _kill_group(pid)
        for pid in self._pids.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids.clear()
        self._kill_strays()

    def detach_worker(self) -> None:
        """Close the server's connections in a forked worker."""
        signal.set_wakeup_fd(-1)
        for each in (self._control, self._wake_in, self._wake_out):
            each.close()

    def serve_as_worker(self, fd: int) -> None:
        """Do the work of a worker in a forked process until its socket ends."""
        if self._max_memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (self._max_memory_bytes, self._max_memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        worker_main(socket.socket(fileno=fd), self._rules)

    def _handle(self, message: ToForkServer) -> None:
        if isinstance(message, PreloadRule):
            self._preload(message)
        elif isinstance(message, ForkWorker):
            self._fork(message.worker, self._fds.pop(0))
        elif (pid := self._pids.get(message.worker)) is not None:
            _kill_group(pid)

    def _preload(self, message: PreloadRule) -> None:
        try:
            error = self._rules.load(message)
        except MemoryError as failure:
            error = f"MemoryError: {failure}"
        gc.collect()
        # frozen objects are not written to by the collector of a worker, so that their pages stay shared
        gc.freeze()
        self._send(RulePreloaded(message.rule, None if error is None else clean(error)))

    def _fork(self, worker: int, fd: int) -> None:
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes: the pool tries again
            os.close(fd)
            self._send(WorkerExited(worker, None))
            return
        if pid == 0:
            _run_worker(self, fd, server_pid)
        # parent and child both do it: a kill of the group must find it whichever of the two runs first
        with suppress(OSError):
            os.setpgid(pid, pid)
        os.close(fd)
        self._pids[worker] = pid
        self._send(WorkerForked(worker, pid))

    def _reap(self) -> None:
        """Report every worker that has ended, after its group and its strays are killed."""
        workers = {pid: worker for worker, pid in self._pids.items()}
        while True:
            try:
                # WNOWAIT leaves the zombie: its pid, which names the group, cannot be another process's yet
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
                self._send(WorkerExited(worker, code))

    def _kill_strays(self) -> None:
        """Kill children that are no workers: processes that a dead worker had started outside its group."""
        known = set(self._pids.values())
        with suppress(OSError):
            for text in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split():
                if int(text) not in known:
                    with suppress(ProcessLookupError):
                        os.kill(int(text), signal.SIGKILL)

    def _send(self, message: msgspec.Struct) -> None:
        # the service is gone: the next read says so and ends the loop
        with suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(encode(message))


def _run_worker(server: ForkServer, fd: int, server_pid: int) -> None:
    """Run a worker in the forked process. Never returns: the server's code must not continue in a worker."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # a server that died before the line above sends no death signal any more
        if os.getppid() == server_pid:
            server.detach_worker()
            server.serve_as_worker(fd)
            code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0
    except BaseException as error:  # a rule may raise anything; only the exit code may leave this process
        with suppress(Exception):
            sys.stderr.write(f"reward worker {os.getpid()}: {type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def _kill_group(pid: int) -> None:
    # the group does not exist yet where the worker was forked a moment ago: then the process alone is killed
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call prctl, which is Linux only. Elsewhere, or where it is forbidden, process groups alone have to do."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main() -> None:
    """Serve the service that holds the other end of the socket."""
    server = ForkServer(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    try:
        server.run()
    except ConnectionResetError:
        return
    finally:
        server.stop()


if __name__ == "__main__":
    main()
