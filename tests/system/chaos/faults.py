"""The deck: every fault that is dealt, each a card with a place, a beginning and an end.

a process      kill -9, SIGTERM, SIGSTOP for some seconds           of redis, buffer, reward, store, trainer, searcher
a link         cut, deaf (both ways, one way), slow, reset half-way  between each pair that talks
a worker       kill -9                                              of the processes that play a searcher's episodes
the store      503, slow, answers lost, answers cut in half; files of weights with a flipped bit, with bytes missing,
               with the content of another delta; deltas or keyframes that are not there    at its relay
Redis          refuses writes (maxmemory, no replica), disk full, appendonly switched off
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis

from tests.support.environments import worker_pids
from tests.system.chaos import links
from tests.system.chaos.deployment import Deployment

HOLD_S = (1.0, 10.0)
"""Range of the duration of faults that end by themselves."""
DOWN_SHARE = 0.5
"""A killed component starts again after at most this share of the longest hold."""
GRACE_S = 90.0
"""Time after SIGTERM; a component that takes longer counts as hung. The longest grace of the product is 30 s."""
PROCESSES = ("redis", "buffer", "reward", "store", "trainer", "searcher")
LINKS = (
    "trainer-buffer",
    "searcher-buffer",
    "searcher-reward",
    "trainer-store",
    "searcher-store",
    "buffer-redis",
    "buffer-reward",
)
STORE_FAULTS = ("503", "slow", "lose", "half", "flip", "short", "other delta", "no delta", "no keyframe")
FREE_BYTES = 20_000
"""Free space of the full disk."""
Action = Callable[[], object]


@dataclass(frozen=True)
class Card:
    fault: str
    place: str


@dataclass
class Strike:
    """A card that was dealt: `begin` does it, `end` undoes it and returns when the cause is gone.

    `hit` names what was really struck, for example searcher-1.
    """

    card: Card
    hit: str
    hold_s: float
    begin: Action
    end: Action
    waits: bool = False
    """True: `end` waits for the component to end and to be started again."""


class HungError(Exception):
    """A component did not end within its grace period."""


def deck() -> list[Card]:
    cards = [Card(fault, place) for place in PROCESSES for fault in ("kill -9", "SIGTERM", "SIGSTOP")]
    cards.remove(Card("SIGTERM", "store"))  # it is stopped by SIGKILL (deploy/objectstore/Dockerfile)
    cards.append(Card("kill -9", "worker"))
    cards += [Card(f"link {mode}", place) for place in LINKS for mode in links.FAULTS]
    cards += [Card(f"store {fault}", "store") for fault in STORE_FAULTS]
    return cards + [Card(fault, "redis") for fault in ("maxmemory", "no replica", "disk full", "appendonly no")]


def strike(card: Card, world: Deployment, rng: random.Random, hold_range_s: tuple[float, float] = HOLD_S) -> Strike:
    """Turn a card into an action; chance chooses the searcher and the duration."""
    hit = card.place.replace("searcher", rng.choice(world.searchers)) if "searcher" in card.place else card.place
    hold_s = rng.uniform(*hold_range_s)
    if card.fault.startswith("link "):
        mode = card.fault.removeprefix("link ")
        begin, end = (lambda: _set_links(world, hit, mode)), (lambda: _set_links(world, hit, "open"))
    elif card.fault.startswith("store "):
        begin, end = (lambda: _spoil(world, card.fault.removeprefix("store "))), (lambda: _spoil(world, None))
    elif card.fault == "SIGSTOP":
        component = world.supervisor.components[hit]
        begin, end = (lambda: component.send(signal.SIGSTOP)), (lambda: component.send(signal.SIGCONT))
    elif card.place in PROCESSES and card.fault in ("kill -9", "SIGTERM"):
        number = signal.SIGKILL if card.fault == "kill -9" else signal.SIGTERM
        hold_s, down_s = 0.0, rng.uniform(0, DOWN_SHARE * hold_range_s[1])
        starts = world.supervisor.components[hit].num_starts
        begin = lambda: world.supervisor.strike(hit, number, down_s=down_s)  # noqa: E731
        end = lambda: _until_started(world, hit, starts)  # noqa: E731
    elif card.place == "worker":
        hit, hold_s = f"worker of {rng.choice(world.searchers)}", 0.0
        begin, end = (lambda: _kill_worker(world, hit.rpartition(" ")[2])), (lambda: None)
    else:
        begin, end = _redis_fault(card.fault, world)
    return Strike(
        card,
        hit,
        hold_s,
        begin,
        end,
        waits=card.fault in ("kill -9", "SIGTERM", "disk full") and card.place != "worker",
    )


def _set_links(world: Deployment, name: str, mode: str) -> None:
    """The buffer asks the reward service only for what came without a score: the first searcher is cut off from it."""
    if name == "buffer-reward":
        world.set_link(f"{world.searchers[0]}-reward", "open" if mode == "open" else "cut")
    world.set_link(name, mode)


def _kill_worker(world: Deployment, searcher: str) -> None:
    """Kill a process that plays episodes of a searcher, in the middle of some."""
    process = world.supervisor.components[searcher].process
    found = [] if process is None else worker_pids(process.pid)
    for pid in found[:1]:
        os.kill(pid, signal.SIGKILL)


def _spoil(world: Deployment, how: str | None) -> None:
    world.store_relay.spoil = how  # pyright: ignore[reportAttributeAccessIssue]


def _until_started(world: Deployment, name: str, starts: int) -> None:
    """Wait until the supervisor has started it again."""
    component, deadline_s = world.supervisor.components[name], time.monotonic() + GRACE_S
    while component.num_starts == starts:
        if time.monotonic() > deadline_s:
            component.send(signal.SIGKILL)
            raise HungError(f"{name} did not end within {GRACE_S:.0f} s of SIGTERM")
        time.sleep(0.05)


def _redis_fault(fault: str, world: Deployment) -> tuple[Action, Action]:
    if fault == "disk full":
        component = world.supervisor.components["redis"]

        def fill() -> None:
            """Files of this process can grow by FREE_BYTES more; the supervisor starts the next one with room again."""
            assert component.process is not None
            sizes = [path.stat().st_size for path in component.folder.rglob("*") if path.is_file()]
            _, hard = resource.prlimit(component.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(component.process.pid, resource.RLIMIT_FSIZE, (max(sizes) + FREE_BYTES, hard))
            component.was_struck = True

        starts = component.num_starts
        return fill, lambda: _until_started(world, "redis", starts)
    settings = {
        "maxmemory": (("maxmemory", "1mb"), ("maxmemory", "0")),
        "no replica": (("min-replicas-to-write", "1"), ("min-replicas-to-write", "0")),
        "appendonly no": (("appendonly", "no"), ("appendonly", "yes")),
    }
    first, last = settings[fault]
    return (lambda: _configure(world, *first)), (lambda: _configure(world, *last))


def _configure(world: Deployment, key: str, value: str) -> None:
    with Redis.from_url(world.redis_url, socket_timeout=20) as redis:
        redis.config_set(key, value)
