"""The processes of one trainer, and what they exchange beside shards: commands, tensors, sums.

Commands are msgpack bytes that rank 0 broadcasts over the process group. Every exchange, NCCL's and gloo's, has the
group's deadline, `trainer.collective_timeout_s`; so that a follower with nothing to do can tell a leader that waits for
a batch from one that is gone, the leader sends `beat` commands while it is idle.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec.msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tba.errors import ConfigError, TbaError, TeamError
from tba.logs import get_logger
from tba_trainer.parallel.leaving import num_processes
from tba_trainer.passes import Ranks

BEAT, STOP = "beat", "stop"
_BEATS_PER_DEADLINE = 4
_MAX_BEAT_S = 10.0
_TICK_S = 1.0
_SIGNS_OF_LOSS = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
log = get_logger("team")


class Team:
    """All processes of a trainer, seen from one of them. `alone()` is a team of one that exchanges nothing.

    Args:
        rank: 0 leads.
        device: of this process.
        deadline_s: of every exchange.
    """

    def __init__(self, *, rank: int, num_ranks: int, device: str, deadline_s: float) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.mesh: DeviceMesh | None = None
        """What models are sharded over; None in a team of one."""
        self.run_is_over = False
        """Whether the run is done; the leader says so before it sends the others home."""
        self._deadline_s = deadline_s
        self._lock = threading.RLock()
        self._broken = False
        self._last_sent = time.monotonic()
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None

    @classmethod
    def alone(cls, device: str = "cpu") -> Team:
        """A trainer in one process."""
        return cls(rank=0, num_ranks=1, device=device, deadline_s=0.0)

    @classmethod
    def join(cls, *, device: str, deadline_s: float) -> Team:
        """The team that torchrun has started this process in (environment variables RANK, WORLD_SIZE, LOCAL_RANK,
        MASTER_ADDR, MASTER_PORT); a team of one without them.

        Args:
            device: `trainer.device`; `cuda` becomes this process's own GPU.

        Raises:
            ConfigError: the device is a single one.
            TeamError: the others did not come in time.
        """
        num_ranks = num_processes()
        if num_ranks == 1:
            return cls.alone(device)
        if ":" in device:
            raise ConfigError(
                f"trainer.device is {device!r}, and this trainer has {num_ranks} processes, which would share it; give "
                f"{device.partition(':')[0]!r}: each process then takes one of its own"
            )
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        if device == "cuda":
            device = f"cuda:{local_rank}"
            torch.cuda.set_device(device)
        team = cls(rank=rank, num_ranks=num_ranks, device=device, deadline_s=deadline_s)
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        with team._exchange("the start"):
            dist.init_process_group(backend, timeout=timedelta(seconds=deadline_s))
            team.mesh = init_device_mesh(torch.device(device).type, (num_ranks,))
            dist.barrier()
        return team

    @property
    def is_leader(self) -> bool:
        """Whether this process runs the loop."""
        return self.rank == 0

    @property
    def is_on_one_machine(self) -> bool:
        """Whether one launcher has started all processes."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks)) == self.num_ranks

    def ranks(self) -> Ranks:
        """The team as the passes of a batch see it."""
        if self.num_ranks == 1:
            return Ranks()
        return Ranks(rank=self.rank, num_ranks=self.num_ranks, add_up=_sum_over_ranks)

    def start_beats(self, on_loss: Callable[[], None]) -> None:
        """Keep the followers waiting from now on (leader only).

        Args:
            on_loss: called once, in another thread, when a follower is found to be gone.
        """
        if self.num_ranks > 1:
            self._beats = threading.Thread(target=self._beat, args=(on_loss,), name="team-beats", daemon=True)
            self._beats.start()

    @contextmanager
    def lead(self, command: str, **arguments: Any) -> Iterator[None]:
        """Tell the followers to do `command`; the block does the same in this process. Nothing to tell in a team of
        one.

        A TbaError or OSError in the block is the leader's own: the followers have done their part. Any other error
        leaves them somewhere in between, and the team is broken.

        Raises:
            TeamError: a follower is gone or does not answer.
        """
        if self.num_ranks == 1:
            yield
            return
        with self._lock, self._exchange(command):
            self._send(command, arguments)
            yield

    def commands(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the leader tells, one after another, until it says that it is over (followers only).

        Raises:
            TeamError: the leader is gone, or another process is.
        """
        while True:
            with self._exchange("the next command"):
                command, arguments = msgspec.msgpack.decode(self._broadcast_bytes(b""))
            if command == STOP:
                self.run_is_over = arguments["over"]
                return
            if command == BEAT:
                continue
            with self._exchange(command):
                yield command, arguments

    def share(self, tensor: Tensor | None) -> Tensor:
        """The leader's tensor, in every process, on the CPU.

        Args:
            tensor: in the leader, any; in the others None.
        """
        header = (
            b"" if tensor is None else msgspec.msgpack.encode([str(tensor.dtype).removeprefix("torch."), *tensor.shape])
        )
        dtype, *shape = msgspec.msgpack.decode(self._broadcast_bytes(header))
        if tensor is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)
        return tensor

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._close()
        except TeamError:
            if kind is None:  # otherwise the first error is the one to tell
                raise

    def _close(self) -> None:
        """The leader sends the followers home; a broken team falls apart by itself."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join()
        if self.num_ranks == 1 or self._broken:
            return
        if self.is_leader:
            with self._lock, self._exchange("the end"):
                self._send(STOP, {"over": self.run_is_over})
        dist.destroy_process_group()

    def _send(self, command: str, arguments: Mapping[str, Any]) -> None:
        self._broadcast_bytes(msgspec.msgpack.encode([command, arguments]))
        self._last_sent = time.monotonic()

    def _broadcast_bytes(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0)
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if not self.is_leader:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, src=0)
        return content.numpy().tobytes()

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        if self._broken:
            raise self._loss(what, "it was found before")
        try:
            yield
        except (TbaError, OSError):
            raise
        except RuntimeError as error:
            self._broken = True
            text = str(error).strip().partition("\n")[0]
            if isinstance(error, dist.DistError) or any(sign in text.lower() for sign in _SIGNS_OF_LOSS):
                raise self._loss(what, text) from None
            raise
        except BaseException:
            self._broken = True
            raise

    def _loss(self, what: str, text: str) -> TeamError:
        return TeamError(
            f"process {self.rank} of {self.num_ranks} has lost another process of this trainer during {what!r}: it "
            f"has ended, or did not answer within {self._deadline_s:g} s (trainer.collective_timeout_s): {text}. Its "
            "own last lines say why; start the trainer again, it goes on from the last checkpoint"
        )

    def _beat(self, on_loss: Callable[[], None]) -> None:
        interval_s = min(_MAX_BEAT_S, self._deadline_s / _BEATS_PER_DEADLINE)
        launcher = os.getppid()
        while not self._closed.wait(min(_TICK_S, interval_s)):
            if os.getppid() != launcher:
                # torchrun starts its workers in sessions of their own: who kills it does not reach them
                os.kill(os.getpid(), signal.SIGKILL)
            if time.monotonic() - self._last_sent < interval_s:
                continue
            try:
                with self.lead(BEAT):
                    pass
            except TeamError as error:
                log.error("team_lost", error=str(error))
                on_loss()
                return


class Shared(Mapping[str, Tensor]):
    """Tensors of the leader by name, as a mapping in every process; all must ask for the same ones in the same order.

    Args:
        names: of all tensors.
        source: the tensors themselves, in the leader.
    """

    def __init__(self, team: Team, names: Sequence[str], source: Mapping[str, Tensor] | None = None) -> None:
        self._team, self._names, self._source = team, dict.fromkeys(names), source

    def __getitem__(self, name: str) -> Tensor:
        return self._team.share(None if self._source is None else self._source[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _sum_over_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values
