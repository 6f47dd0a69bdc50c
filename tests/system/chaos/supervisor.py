"""The processes of a chaos run, and their supervisor: it starts again what ends, as Kubernetes does it.

A component that the harness killed comes back after the pause that the fault asked for; one that ended by itself comes
back after RESTART_S, and its end is noted with its last words. Once the run may end, exit code 0 means: it is done.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESTART_S = 1.0
POLL_S = 0.1
TAIL_BYTES = 4000


@dataclass
class Component:
    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    """Its working directory."""
    log_path: Path
    runs_for_ever: bool = True
    """False: it ends with exit code 0 when the run is over."""
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    start_again_s: float | None = None
    """The time at which the supervisor starts it again (monotonic); None: set when it ends."""
    was_struck: bool = False
    is_done: bool = False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                list(self.command),
                env=dict(self.environ),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                restore_signals=False,  # over a full disk Redis must see the error, not die of SIGXFSZ
            )
        self.num_starts += 1
        self.start_again_s, self.was_struck = None, False

    def send(self, number: signal.Signals) -> bool:
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.send_signal(number)
        return True

    def last_words(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return log.read().decode(errors="replace")


@dataclass
class Ending:
    name: str
    exit_code: int
    last_line: str


@dataclass
class Supervisor:
    components: dict[str, Component] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    may_end: threading.Event = field(default_factory=threading.Event)
    """Set once the run has the command to end."""
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _thread: threading.Thread | None = None

    def add(self, component: Component) -> Component:
        self.components[component.name] = component
        return component

    def start(self) -> None:
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()

    def strike(self, name: str, number: signal.Signals, *, down_s: float) -> bool:
        """A signal that ends it; it comes back `down_s` after its end. False when it did not run."""
        with self._lock:
            component = self.components[name]
            if not component.is_running:
                return False
            component.was_struck = True
            component.start_again_s = time.monotonic() + down_s if number == signal.SIGKILL else None
            return component.send(number)

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(10)
        for component in self.components.values():
            component.send(signal.SIGKILL)
            if component.process is not None:
                component.process.wait(30)

    def _supervise(self) -> None:
        while not self._over.wait(POLL_S):
            with self._lock:
                for component in self.components.values():
                    if component.process is not None and not component.is_running and not component.is_done:
                        self._ended(component)

    def _ended(self, component: Component) -> None:
        assert component.process is not None
        code = component.process.returncode
        if code == 0 and self.may_end.is_set() and not component.runs_for_ever:
            component.is_done = True
            return
        if component.start_again_s is None:
            component.start_again_s = time.monotonic() + RESTART_S
            if not component.was_struck:
                lines = component.last_words().strip().splitlines()
                self.endings.append(Ending(component.name, code, lines[-1] if lines else "(nothing)"))
        if time.monotonic() >= component.start_again_s:
            component.start()
