"""What batches have taken: the turns of prompts and the uses of rollouts, as a function of the log.

turns   Prompts are chosen in order: those with the fewest turns come first, so that all have had one before any has
        two. Recent and replay slots count apart. `floors` is the fewest turns of a pool at its last draw, or fewer if
        turns were given back since: a prompt that is new, or was away, counts as if it had had so many, and joins the
        round that is running. A prompt is `due` when it has no more turns than the floor.
uses    How many batches a rollout was in is a column of the index; `sampling.max_uses` bounds it.
void    A batch that became void, and one that a resume has abandoned, gives back its turns and its uses. For that the
        newest MAX_DRAWS batches are remembered. Each of its prompts has one turn fewer per slot, whatever was drawn
        since, and the floor falls with them: a round that had ended is open again until they had their turns.

The drawer decides (sampling/mop.py), and the event names the turn of each slot and the floor that it was drawn at: so
the same events give the same turns whatever else happens between them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba_buffer.index.log import Drawn, Resumed, Voided
from tba_buffer.index.tables import Prompts

MAX_DRAWS = 1024
REPLAY, RECENT = 0, 1
_TURNS_DTYPE = np.dtype([("prompt", "<u4"), ("replay", "<u4"), ("recent", "<u4")])
_USES_DTYPE = np.dtype([("position", "<u8"), ("uses", "<u2")])
DrawEvent = Drawn | Voided | Resumed


class _State(msgspec.Struct, frozen=True, array_like=True):
    floors: tuple[int, int]
    turns: bytes
    uses: bytes
    draws: list[tuple[int, bytes]]


_DECODER = msgspec.msgpack.Decoder(_State)


class DrawHistory:
    """The turns of prompts 0, 1, ... and the newest draws.

    Args:
        change_uses: adds a number to the uses of the rollouts at some positions [N].
        on_turns: called after turns changed: with RECENT or REPLAY and the prompts [k], or None if the floor moved.
    """

    def __init__(
        self,
        change_uses: Callable[[NDArray[np.uint64], int], None],
        on_turns: Callable[[int, Prompts | None], None],
    ) -> None:
        self._change_uses = change_uses
        self._on_turns = on_turns
        self.turns = np.zeros((2, 0), dtype=np.int64)
        """[2, P]"""
        self.floors = np.zeros(2, dtype=np.int64)
        self._draws: dict[str, Drawn] = {}

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return self.turns.nbytes + sum(each.slots.nbytes + each.positions.nbytes for each in self._draws.values())

    def grow(self, num_prompts: int) -> None:
        """Make room for prompt numbers below `num_prompts`."""
        if (more := num_prompts - self.turns.shape[1]) > 0:
            self.turns = np.concatenate([self.turns, np.zeros((2, more), dtype=np.int64)], axis=1)

    def is_due(self, pool: int, prompts: Prompts) -> NDArray[np.bool_]:
        """Return whether prompts [k] have had no more turns than the floor of the pool. [k]"""
        return self.turns[pool][prompts] <= self.floors[pool]

    def apply(self, event: DrawEvent) -> None:
        """Follow one event."""
        match event:
            case Drawn():
                for pool, slots in _by_pool(event):
                    prompts, floor = slots["prompt"].astype(np.int64), int(slots["floor"].max())
                    self.grow(int(prompts.max()) + 1)
                    np.maximum.at(self.turns[pool], prompts, slots["turn"].astype(np.int64))
                    rose = floor > self.floors[pool]
                    self.floors[pool] = max(floor, self.floors[pool])
                    self._on_turns(pool, None if rose else np.unique(prompts))
                self._change_uses(event.positions, 1)
                self._draws[event.batch_id] = event
                if len(self._draws) > MAX_DRAWS:
                    del self._draws[next(iter(self._draws))]
            case Voided():
                for batch_id in event.batch_ids:
                    self._give_back(batch_id)
            case Resumed():
                last_step = {version.lineage: version.step for version in event.history}
                for batch_id, drawn in list(self._draws.items()):
                    if drawn.version.step > last_step.get(drawn.version.lineage, -1):
                        self._give_back(batch_id)

    def _give_back(self, batch_id: str) -> None:
        drawn = self._draws.pop(batch_id, None)
        if drawn is None:
            return
        for pool, slots in _by_pool(drawn):
            turns, slot_prompts = self.turns[pool], slots["prompt"].astype(np.int64)
            np.subtract.at(turns, slot_prompts, 1)
            prompts = np.unique(slot_prompts)
            turns[prompts] = np.maximum(turns[prompts], 0)
            fewest = int(turns[prompts].min())
            fell = fewest < self.floors[pool]
            self.floors[pool] = min(fewest, self.floors[pool])
            self._on_turns(pool, None if fell else prompts)
        self._change_uses(drawn.positions, -1)

    def pack(self, positions: NDArray[np.integer], uses: NDArray[np.integer]) -> bytes:
        """Pack everything, with the uses [N] of the rollouts at `positions` [N]; empty if nothing was ever drawn."""
        if not (self._draws or self.turns.any() or self.floors.any() or uses.any()):
            return b""
        prompts = np.flatnonzero(self.turns.any(axis=0))
        turns = np.empty(len(prompts), dtype=_TURNS_DTYPE)
        turns["prompt"], turns["replay"], turns["recent"] = prompts, *self.turns[:, prompts]
        used = np.flatnonzero(uses)
        packed = np.empty(len(used), dtype=_USES_DTYPE)
        packed["position"], packed["uses"] = positions[used], uses[used]
        draws = [(each.position, each.pack()) for each in self._draws.values()]
        floors = (int(self.floors[0]), int(self.floors[1]))
        return msgspec.msgpack.encode(_State(floors, turns.tobytes(), packed.tobytes(), draws))

    def restore(self, data: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
        """Take the turns and draws that `pack` wrote; return positions [N] and uses [N].

        Raises:
            ValueError: it is nothing that `pack` writes.
        """
        state = _DECODER.decode(data)
        turns, uses = np.frombuffer(state.turns, dtype=_TURNS_DTYPE), np.frombuffer(state.uses, dtype=_USES_DTYPE)
        prompts = turns["prompt"].astype(np.int64)
        self.grow(int(prompts.max(initial=-1)) + 1)
        self.turns[REPLAY, prompts], self.turns[RECENT, prompts] = turns["replay"], turns["recent"]
        self.floors[:] = state.floors
        draws = [Drawn.unpack(position, packed) for position, packed in state.draws]
        self._draws = {drawn.batch_id: drawn for drawn in draws}
        for pool in (REPLAY, RECENT):
            self._on_turns(pool, None)
        return uses["position"].copy(), uses["uses"].copy()


def _by_pool(drawn: Drawn) -> list[tuple[int, NDArray[np.void]]]:
    """Return the slots of each pool that took turns."""
    slots, found = drawn.slots[drawn.slots["turn"] > 0], []
    for pool in (REPLAY, RECENT):
        if len(part := slots[slots["is_recent"] == pool]):
            found.append((pool, part))
    return found
