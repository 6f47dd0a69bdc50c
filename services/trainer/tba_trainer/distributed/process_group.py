"""The processes of one trainer, and what they exchange apart from shards: commands, tensors, sums.

Rank 0 broadcasts commands as msgpack bytes over the process group. Every exchange, over NCCL or gloo, has the group's
deadline, `trainer.collective_timeout_s`. While the leader is idle it sends `beat` commands: a follower with nothing to
do can then tell a leader that waits for a batch from one that is gone.
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
from torch.distributed.device_mesh import DeviceMesh

from tba.errors import ConfigError, TbaError, TeamError
from tba.logs import get_logger
from tba_trainer.distributed.launch import LAUNCHER_VARIABLE
from tba_trainer.learner.forward_backward import ALONE, Ranks
from tba_trainer.model.context import Context

BEAT, STOP = "beat", "stop"
_BEATS_PER_DEADLINE = 4
_MAX_BEAT_S = 10.0
_TICK_S = 1.0
_LOSS_MESSAGES = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
log = get_logger("team")


class Team:
    """All processes of a trainer, seen from one of them. A team of one exchanges nothing.

    Args:
        rank: 0 is the leader.
        device: device of this process.
        deadline_s: deadline of every exchange, in seconds.
    """

    def __init__(self, *, rank: int, num_ranks: int, device: str, deadline_s: float) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.mesh: DeviceMesh | None = None
        """The mesh that models are sharded over; None in a team of one."""
        self.context: Context | None = None
        """The processes that share each pass with this one; None: it makes passes of its own."""
        self.beside: Team | None = None
        """A second team of the same processes, with its own process group, for a thread beside training. None in a team
        of one, and in the second team."""
        self.run_is_over = False
        """Whether the run is done; the leader tells the followers with its last command."""
        self._deadline_s = deadline_s
        self._group: dist.ProcessGroup | None = None
        """None: torch's default group of all processes."""
        self._lock = threading.RLock()
        self._broken = False
        self._last_sent = time.monotonic()
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None

    @classmethod
    def alone(cls, device: str = "cpu") -> Team:
        """Return a team of one process."""
        return cls(rank=0, num_ranks=1, device=device, deadline_s=0.0)

    @classmethod
    def join(cls, *, device: str, deadline_s: float, context: int = 1) -> Team:
        """Join the team that torchrun has started this process in; without torchrun, a team of one.

        Reads the environment variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. From then on this
        process is killed when its launcher is gone.

        Args:
            device: `trainer.device`; `cuda` becomes this process's own GPU.
            context: number of processes that share each pass.

        Raises:
            ConfigError: the device has a number, so all processes would share it; or WORLD_SIZE is no multiple of
                `context`.
            TeamError: the others did not join in time.
        """
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if num_ranks == 1:
            return cls.alone(device)
        if ":" in device:
            raise ConfigError(
                f"trainer.device is {device!r}, and this trainer has {num_ranks} processes, which would share it; set "
                f"it to {device.partition(':')[0]!r}: each process then uses a device of its own"
            )
        if num_ranks % context:
            raise ConfigError(
                f"trainer.sharding.context is {context}, and this trainer has {num_ranks} processes, which is no "
                "multiple of it: they are dealt to groups of that size"
            )
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        if device == "cuda":
            device = f"cuda:{local_rank}"
            torch.cuda.set_device(device)
        threading.Thread(target=_end_with_launcher, name="team-launcher", daemon=True).start()
        team = cls(rank=rank, num_ranks=num_ranks, device=device, deadline_s=deadline_s)
        # commands, sums and shared tensors are on the CPU, shards on the GPU
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        with team._exchange("the start"):
            deadline = timedelta(seconds=deadline_s)
            dist.init_process_group(backend, timeout=deadline)
            team.mesh = mesh_of_all(torch.device(device).type)
            team.context = Context.join(context, deadline=deadline)
            # exchanges of two groups may cross, those of one must not: a thread with its own waits for no step
            team.beside = cls(rank=rank, num_ranks=num_ranks, device="cpu", deadline_s=deadline_s)
            group: Any = dist.new_group(backend="gloo", timeout=deadline)
            team.beside._group = group
            dist.barrier()
        return team

    @property
    def is_leader(self) -> bool:
        """Whether this process runs the loop."""
        return self.rank == 0

    @property
    def num_local_ranks(self) -> int:
        """Number of processes on this machine, which one launcher started."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))

    def ranks(self) -> Ranks:
        """Return the ranks that share a batch."""
        return ALONE if self.num_ranks == 1 else ranks_of(self.rank, self.num_ranks, self.context)

    def start_beats(self, on_loss: Callable[[], None]) -> None:
        """Start a thread that sends beats while the leader is idle; `on_loss` is called if a follower is gone."""
        if self.num_ranks > 1:
            self._beats = threading.Thread(target=self._beat, args=(on_loss,), name="team-beats", daemon=True)
            self._beats.start()
            if self.beside is not None:
                # whoever asks for what is done beside training finds the loss
                self.beside.start_beats(on_loss=lambda: None)

    @contextmanager
    def lead(self, command: str, **arguments: Any) -> Iterator[None]:
        """Send the followers a command; the caller's `with` block does the same work in this process.

        A team of one sends nothing. A TbaError or OSError in the block is the leader's own: the followers have done
        their part. After any other error the state of the followers is unknown, and the team is broken.

        Raises:
            TeamError: a follower is gone or does not answer.
        """
        if self.num_ranks == 1:
            yield
            return
        # The lock keeps the thread that sends beats out: two collectives of one rank must never interleave.
        with self._lock, self._exchange(command):
            if self._closed.is_set():
                raise TeamError(f"the team has ended before the command {command!r}")
            self._send(command, arguments)
            yield

    def commands(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and arguments of each command, until the leader ends the team (followers only).

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
        """Broadcast the leader's tensor, and return it on the CPU in every process (a collective).

        Args:
            tensor: any tensor in the leader; None in the followers.
        """
        header = (
            b"" if tensor is None else msgspec.msgpack.encode([str(tensor.dtype).removeprefix("torch."), *tensor.shape])
        )
        dtype, *shape = msgspec.msgpack.decode(self._broadcast_bytes(header))
        if tensor is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel():  # as bytes, because gloo does not know every dtype
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._group)
        return tensor

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all processes, in order of rank (a collective)."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._group)
        padded = torch.zeros(max(int(length) for length in lengths) or 1, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.num_ranks)]
        dist.all_gather(found, padded, group=self._group)
        return [content[: int(length)].numpy().tobytes() for content, length in zip(found, lengths, strict=True)]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._close()
        except TeamError:
            if kind is None:  # else the first error is the one to report
                raise

    def _close(self) -> None:
        """End the team: the leader sends the last command. A broken team ends without one."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join()
        if self.beside is not None:  # first: its followers' threads use what is destroyed below
            self.beside._broken = self.beside._broken or self._broken
            self.beside._close()
        if self.num_ranks == 1 or self._broken:
            return
        if self.is_leader:
            with self._lock, self._exchange("the end"):
                self._send(STOP, {"over": self.run_is_over})
        if self._group is None:
            dist.destroy_process_group()

    def _send(self, command: str, arguments: Mapping[str, Any]) -> None:
        self._broadcast_bytes(msgspec.msgpack.encode([command, arguments]))
        self._last_sent = time.monotonic()

    def _broadcast_bytes(self, data: bytes) -> bytes:
        # the length first: a broadcast needs a buffer of the right size in every process
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0, group=self._group)
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if not self.is_leader:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self._group)
        return content.numpy().tobytes()

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        if self._broken:
            raise self._loss(what, "it was found before")
        try:
            yield
        except (TbaError, OSError):  # the leader's own error: the followers have done their part
            raise
        except RuntimeError as error:
            self._broken = True
            text = str(error).strip().partition("\n")[0]
            # some losses raise a plain RuntimeError: only its text tells them from other errors
            if isinstance(error, dist.DistError) or any(message in text.lower() for message in _LOSS_MESSAGES):
                raise self._loss(what, text) from None
            raise
        except BaseException:
            self._broken = True
            raise

    def _loss(self, what: str, text: str) -> TeamError:
        return TeamError(
            f"process {self.rank} of {self.num_ranks} has lost another process of this trainer during {what!r}: it "
            f"has ended, or did not answer within {self._deadline_s:g} s (trainer.collective_timeout_s): {text}. Its "
            "own last lines say why; start the trainer again, it continues from the last checkpoint"
        )

    def _beat(self, on_loss: Callable[[], None]) -> None:
        interval_s = min(_MAX_BEAT_S, self._deadline_s / _BEATS_PER_DEADLINE)
        while not self._closed.wait(min(_TICK_S, interval_s)):
            if time.monotonic() - self._last_sent < interval_s:  # every command is a sign of life
                continue
            try:
                with self.lead(BEAT):
                    pass
            except TeamError as error:
                log.error("team_lost", error=str(error))
                on_loss()
                return


class BroadcastTensors(Mapping[str, Tensor]):
    """Tensors of the leader by name, as a mapping in every process. Each access is a broadcast.

    All processes must access the same names in the same order.

    Args:
        names: names of all tensors.
        source: the tensors, in the leader; None in the followers.
    """

    def __init__(self, team: Team, names: Sequence[str], source: Mapping[str, Tensor] | None = None) -> None:
        self._team, self._names, self._source = team, dict.fromkeys(names), source

    def __getitem__(self, name: str) -> Tensor:
        return self._team.share(None if self._source is None else self._source[name])

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would access the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def mesh_of_all(device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks, to shard models over. Its collectives have the deadline of the process group."""
    return DeviceMesh.from_group(dist.group.WORLD, device_type)  # pyright: ignore[reportArgumentType]


def _end_with_launcher() -> None:
    """Wait until the launcher of this process is gone, then kill this process."""
    # torchrun starts its workers in sessions of their own: a signal that kills it does not reach them. It may be gone
    # already, since imports take a while; torchrun without our launcher does not say who it is
    launcher = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
    while os.getppid() == launcher:
        time.sleep(_TICK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def ranks_of(rank: int, num_ranks: int, context: Context | None) -> Ranks:
    """Return the ranks that share a batch. A context group, whose processes share each pass, counts as one rank."""

    def all_reduce(values: Tensor) -> Tensor:
        if context is not None and context.rank > 0:
            values = torch.zeros_like(values)  # all of a group found the same: its first process says it
        dist.all_reduce(values)
        return values

    size = 1 if context is None else context.size
    return Ranks(rank=rank // size, num_ranks=num_ranks // size, all_reduce=all_reduce)
