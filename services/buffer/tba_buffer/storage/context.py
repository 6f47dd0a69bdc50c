"""The context that every part of this service is built with: the recipe, the storage of the run, and the clock.

Scripts runs the Lua scripts (lua/*.lua). Every change of more than one key is a script, atomic and safe to repeat. A
second run with the same arguments stores, leases, draws and counts nothing twice. Only a repeated push reports and
counts its items as duplicates. Each file begins with its arguments and replies; keys.py describes the keys.

Every call that asks Redis raises UnavailableError for every error of Redis. Docstrings outside this package name
only further errors. RunHash parses the fields of the `run` hash for all other modules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.resources import files
from typing import Any, TypeVar, cast, get_args

import msgspec
from pydantic import BaseModel
from redis.exceptions import NoScriptError, ResponseError

from tba.api import RollbackInfo, RunChange, RunState
from tba.config import Recipe
from tba.config.redis import redis_access
from tba.errors import SupersededError, UnavailableError
from tba.fields import MAX_NUMBER, one_line
from tba.versions import PolicyVersion
from tba_buffer.storage.buffer_epoch import BufferEpoch
from tba_buffer.storage.durability import DurabilityCheck
from tba_buffer.storage.keys import Keys
from tba_buffer.storage.lost_changes import LOSS_COUNTERS, Losses
from tba_buffer.storage.redis_client import BytesRedis, Command, read_count, redis_errors

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
DAMAGE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors that parsing damaged bytes can raise."""
MAX_DETAIL_CHARS = 300
_FOLDER = files("tba_buffer.storage") / "lua"
SCRIPT_NAMES = tuple(sorted(path.name.removesuffix(".lua") for path in _FOLDER.iterdir() if path.is_file()))
ACKNOWLEDGING = {
    "push",
    "score",
    "publish",
    "upload",
    "eval_request",
    "eval_results",
    "start_lineage",
    "register_checkpoint",
    "command",
    "rollback",
    "ack",
    "load_snapshot",
    "settings",
    "scale",
}
"""Scripts that acknowledge a change: each adds one to the counter `acknowledged` (lost_changes.py). Leases, draws and
evictions do not count, because they are repeated when Redis has lost them."""
HEAD = """\
local args = cmsgpack.unpack(ARGV[1])
local function key(name) return KEYS[1] .. name end
local function digits(number) return string.format('%.0f', number) end
local function is_superseded() return redis.call('GET', key('replica')) ~= digits(args.epoch) end
"""
"""Prepended to every script. KEYS[1] is the prefix of the run's keys. ARGV[1] is a msgpack map of the arguments.
Its numbers are doubles in Lua: a whole number is exact up to 2^53. The other ARGV are payloads of rollouts."""
PRELUDES = {
    "push": ("log", "visits"),
    "renew": ("visits",),
    "lease": ("visits",),
    "return": ("visits",),
    "read_run": ("log",),
    "start_lineage": ("log", "audit"),
    "command": ("audit",),
    "rollback": ("audit",),
    "accept_loss": ("audit",),
    "draw": ("log",),
    "evict": ("log",),
    "load_snapshot": ("log",),
    "publish": ("log",),
    "score": ("log",),
}
SUPERSEDED = b"superseded"


def script_text(name: str) -> str:
    """Return the text of a script, with HEAD and its preludes in front: Lua scripts in Redis cannot import."""
    parts = [*(f"preludes/{each}" for each in PRELUDES.get(name, ())), name]
    return "\n".join([HEAD, *((_FOLDER / f"{part}.lua").read_text(encoding="utf-8") for part in parts)])


class Scripts:
    """Runs scripts by name.

    Args:
        durability: owns the connections; while it finds Redis not durable, only accept_loss runs.
        keys: the key names of the run.
        epoch: the epoch of this process, an argument of every script.
        losses: is told the value of the counter `acknowledged` after each script of ACKNOWLEDGING.
    """

    def __init__(self, durability: DurabilityCheck, keys: Keys, epoch: BufferEpoch, losses: Losses) -> None:
        self._durability, self._epoch, self._losses = durability, epoch, losses
        self._prefix = keys.prefix
        self._number = ("HINCRBY", keys.counters, "acknowledged", 1)
        self._read_epoch = ("GET", keys.epoch)
        redis = durability.redis
        self._scripts = {name: redis.register_script(script_text(name)) for name in SCRIPT_NAMES}

    async def run(self, name: str, *payloads: bytes, **args: Any) -> Any:
        """Run a script and return its reply; texts are bytes.

        Args:
            name: the file name of the script, without `.lua`.
            payloads: msgpack bytes of rollouts, outside the map of arguments because Redis would copy them once more.
            args: the script's arguments; None means that the argument is absent.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not run it, did not answer, or could lose what it wrote.
        """
        return (await self.run_with(name, args, payloads))[0]

    async def run_with(
        self, name: str, args: Mapping[str, Any], payloads: Sequence[bytes] = (), commands: Sequence[Command] = ()
    ) -> list[Any]:
        """Run a script, then plain commands, in one round trip, not atomically. Return its reply, then one per command.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not run them, did not answer, or could lose what it wrote.
        """
        script, acknowledged = self._scripts[name], self._losses.acknowledged
        if name in ACKNOWLEDGING:
            # counted behind the script: a file that was cut between the two counts too little, never too much
            commands = (*commands, self._number, self._read_epoch)
        await self._durability.require()
        with redis_errors(f"run {name}"):
            evalsha = ("EVALSHA", script.sha, 1, self._prefix, self._pack(args), *payloads)
            try:
                replies = await self._durability.pool.run(evalsha, *commands)
            except NoScriptError:  # Redis was restarted
                await self._durability.redis.script_load(script.script)
                replies = await self._durability.pool.run(evalsha, *commands)
            except ResponseError:  # perhaps its counters are damaged: then the check says what to do
                await self._durability.check()
                await self._durability.require()
                raise
        if name in ACKNOWLEDGING:
            epoch, number = read_count(replies.pop()) or 0, replies.pop()
            if await self._losses.acknowledge(number, acknowledged, epoch=epoch):
                await self._durability.check()
        # the script may have run over a new connection, behind which is a Redis that is not durable
        await self._durability.require()
        if replies[0] == SUPERSEDED:
            what = f"{name} of {len(payloads)} rollouts" if payloads else name
            await self._epoch.check(what)
            # nobody else took the run: Redis has forgotten epochs, and data with them
            await self._durability.check()
            why = self._durability.broken or "Redis has changed meanwhile, try again"
            raise UnavailableError(f"{what} was refused: {why}")
        return replies

    async def accept_loss(self, **args: Any) -> int:
        """Run accept_loss.lua, the one script that may run after a loss; return the number that counting goes on from.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not run it.
        """
        with redis_errors("accept a loss"):
            reply = await self._scripts["accept_loss"](keys=[self._prefix], args=[self._pack(args)])
        if reply == SUPERSEDED:
            raise SupersededError("accepting a loss was refused: a newer buffer process owns the run")
        return int(reply)

    def _pack(self, args: Mapping[str, Any]) -> bytes:
        # Lua reads only the text type of msgpack (0xdb and the length)
        texts = {
            name: msgspec.Raw(b"\xdb" + len(value).to_bytes(4, "big") + value)
            for name, value in args.items()
            if isinstance(value, bytes)
        }
        return msgspec.msgpack.encode({"epoch": self._epoch.number, **args, **texts})


class Signal:
    """Wakes long polls when something they may wait for has changed.

    Example:
        ticket = signal.ticket    # before looking
        ...look, and find that it is not there yet...
        await signal.wait(ticket, 0.5)    # returns at once if something changed since the ticket was taken
    """

    def __init__(self) -> None:
        self.ticket = asyncio.Event()
        """The event that the next `notify` sets; `notify` then replaces it."""

    def notify(self) -> None:
        """Wake every waiter."""
        self.ticket.set()
        self.ticket = asyncio.Event()

    async def wait(self, ticket: asyncio.Event, timeout_s: float) -> None:
        """Wait until something has changed since the ticket was taken, at most `timeout_s`."""
        try:
            await asyncio.wait_for(ticket.wait(), timeout_s)
        except TimeoutError:
            return


@dataclass(frozen=True, kw_only=True)
class Context:
    """The recipe, the Redis of the run, and the clock (Unix seconds)."""

    recipe: Recipe
    redis: BytesRedis
    durability: DurabilityCheck
    keys: Keys
    scripts: Scripts
    losses: Losses
    epoch: BufferEpoch
    clock: Callable[[], float] = time.time
    changed: Signal = field(default_factory=Signal)
    """Wakes waiting draws: there are new rollouts or scores, or the state of the run has changed."""
    leasable: Signal = field(default_factory=Signal)
    """Wakes waiting lease requests: after a draw, a return of leases, an evaluation, a weight version, or a change of
    the run's state. Nothing notifies other reasons to grant a lease, so waiting requests also poll."""
    mutation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by evictor, scorer, re-scoring and a snapshot's last pass, so that one alone changes or removes rollouts.

    Pushes do not need it. Its holder first catches the index up, so that the index has every rollout to be changed.
    """

    def notify_all(self) -> None:
        """Wake every long poll."""
        self.changed.notify()
        self.leasable.notify()

    @classmethod
    def connect(cls, recipe: Recipe, *, clock: Callable[[], float] = time.time) -> Context:
        """Wire the storage of a run. Connections are made with the first command.

        Raises:
            ConfigError: buffer.redis_url is no URL of Redis.
        """
        # it owns the connections, so that nothing is written over one that was not checked
        durability = DurabilityCheck(redis_access(recipe), bool(recipe.buffer.read_only))
        keys = Keys(recipe.run.name)
        epoch = BufferEpoch(durability.redis, keys, recipe.run.name)
        losses = Losses(durability.redis, keys, epoch, clock=clock)
        return cls(
            recipe=recipe,
            redis=durability.redis,
            durability=durability,
            keys=keys,
            scripts=Scripts(durability, keys, epoch, losses),
            losses=losses,
            epoch=epoch,
            clock=clock,
        )

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.recipe.run.name

    async def count(self, name: str, number: int = 1) -> None:
        """Add `number` to the counter `name`. While Redis may have lost data of the run, or may lose it, do nothing."""
        # a write would take the place of what a restored Redis has
        if self.durability.broken is None:
            with redis_errors(f"count {name}"):
                await self.redis.hincrby(self.keys.counters, name, number)

    async def counters(self) -> Mapping[str, int]:
        """Return all counters; an absent name has never been counted."""
        with redis_errors("read the counters"):
            raw = await self.redis.hgetall(self.keys.counters)
        return self.parse_counters(raw)

    def parse_counters(self, raw: Mapping[bytes, bytes], key: str | None = None) -> dict[str, int]:
        """Parse the HGETALL reply of a hash of counters: of `key`, or of `keys.counters` if that is None.

        Raises:
            UnavailableError: a counter is damaged. A damaged one of LOSS_COUNTERS is left out instead.
        """
        found: dict[str, int] = {}
        for name, value in raw.items():
            text = name.decode(errors="replace")
            if text not in LOSS_COUNTERS:
                found[text] = needed(key or self.keys.counters, text, lambda value=value: int(value))
            elif (number := read_count(value)) is not None:
                found[text] = number
        return found


def parse_number(text: bytes | None, *, lowest: int = 0, absent: int = 0) -> int:
    """Parse a stored whole number; return `absent` where there is none.

    Raises:
        ValueError: it is no number, or not between `lowest` and MAX_NUMBER.
    """
    number = int(text or absent)
    if not lowest <= number <= MAX_NUMBER:
        raise ValueError(f"it is {number}")
    return number


parse_cursor = partial(parse_number, lowest=-1, absent=-1)
"""Parses the position in the snapshot's log up to which it is loaded; -1: nothing is loaded."""


def unreadable(key: str, name: str, error: BaseException) -> UnavailableError:
    """Return the error for a field that cannot be parsed: its bytes are damaged, or another release wrote them."""
    why = one_line(f"{type(error).__name__}: {error}".partition(" [type=")[0])[:MAX_DETAIL_CHARS]
    why = why.encode(errors="backslashreplace").decode()
    return UnavailableError(f"the field {name} of {key} in Redis cannot be read ({why}); restore Redis from a copy")


def needed(key: str, name: str, how: Callable[[], T]) -> T:
    """Call `how`, the parser of a stored field, and return its result.

    Raises:
        UnavailableError: the parser failed; the message names the Redis key `key` and the field `name`.
    """
    try:
        return how()
    except DAMAGE_ERRORS as error:
        raise unreadable(key, name, error) from None


async def read_lines(
    context: Context, key: str, model: type[M], *, after: int, limit: int
) -> tuple[list[M], int | None]:
    """Return at most `limit` audit lines after line number `after`, and the line number to continue after, if any.

    Raises:
        UnavailableError: Redis did not answer, or a line cannot be read.
    """
    end = after + limit
    with redis_errors(f"read {key}"):
        async with context.redis.pipeline(transaction=True) as pipe:
            pipe.lrange(key, after, end - 1)
            pipe.llen(key)
            lines, num_lines = await pipe.execute()
    found = [
        needed(key, f"line {number}", partial(model.model_validate_json, line))
        for number, line in enumerate(lines, after + 1)
    ]
    return found, end if lines and end < num_lines else None


def _field(name: str, parse: Callable[[bytes], T], absent: T = None) -> cached_property[T]:
    """Define a field of RunHash: its name, its parser, and its value where Redis has none."""

    def read(run: RunHash) -> T:
        text = run.raw.get(name.encode())
        return absent if text is None else needed(run.context.keys.run, name, partial(parse, text))

    return cached_property(read)


def _state(text: bytes) -> RunState:
    state = text.decode()
    if state not in get_args(RunState):
        raise ValueError(f"it is {state[:100]!r}")
    return cast(RunState, state)


def _version(text: bytes) -> str:
    return str(PolicyVersion.parse(text.decode()))


_text = partial(str, encoding="utf-8", errors="replace")


class RunHash:
    """The `run` hash as Redis had it at one moment. Versions are `lineage-step` texts.

    A field is parsed at its first access. A damaged field raises UnavailableError with its name, so that no work is
    handed out by a guess.

    Args:
        context: Redis and settings.
        raw: field -> text, the reply of HGETALL, perhaps from a transaction with other keys.
    """

    state: cached_property[RunState] = _field("state", _state, "running")  # a run has none before its first change
    lineage = _field("lineage", parse_number, 0)
    step = _field("step", parse_number, 0)  # the last acked one of the active lineage
    token = _field("token", _text)
    reason = _field("reason", lambda text: _text(text) or None)
    latest_version = _field("latest_version", _version)
    stored_sampling_version = _field("sampling_version", _version)
    checkpoint = _field("checkpoint", _version)
    checkpoint_key = _field("checkpoint_key", _text)
    # None: no trainer has said yet
    checkpoints_kept = _field("checkpoints_kept", lambda text: [*map(PolicyVersion.parse, text.decode().split())])
    num_rollbacks = _field("rollbacks", parse_number, 0)
    rollback = _field("rollback", RollbackInfo.model_validate_json)
    num_lost_changes = _field("changes_lost", parse_number, 0)
    num_losses_accepted = _field("losses_accepted", parse_number, 0)
    change = _field("change", RunChange.model_validate_json)  # the last change of the state
    origin_cursor = _field("origin_cursor", parse_cursor, -1)

    def __init__(self, context: Context, raw: Mapping[bytes, bytes | None]) -> None:
        self.context, self.raw = context, raw

    @classmethod
    async def read(cls, context: Context, what: str = "read the run") -> RunHash:
        """Read the hash from Redis, outside of a transaction.

        Args:
            what: names the action in the error: "Redis could not <what>".
        """
        with redis_errors(what):
            return cls(context, await context.redis.hgetall(context.keys.run))

    @property
    def sampling_version(self) -> str | None:
        """The version that searchers sample with."""
        # absent before the first publication of a fork
        return self.stored_sampling_version or self.latest_version

    def parse_all(self) -> RunHash:
        """Parse every field now, so that damage shows at once, and return self.

        Raises:
            UnavailableError: a field is damaged.
        """
        for name, item in vars(RunHash).items():
            if isinstance(item, cached_property):
                getattr(self, name)
        return self
