"""The turns of prompts and the uses of rollouts in drawn batches, as a function of the log.

turns   Prompts are drawn in rounds: those with the fewest turns come first, so that all have had one before any has
        two. Recent and replay slots count turns separately. `floors` holds per pool the fewest turns of a prompt at the
        last draw, or fewer if turns were given back since. A prompt that is new, or was absent, counts as if it had
        that many turns, and joins the current round. A prompt is `due` when it has no more turns than the floor.
uses    The index column `uses` counts the batches that a rollout was in; `sampling.max_uses` bounds it.
void    A batch that became void, or that a resume has abandoned, gives back its turns and its uses. For this the
        newest MAX_DRAWS batches are remembered. Each prompt of the batch loses one turn per slot, whatever was drawn
        since. The floor falls with them: a finished round is open again until these prompts have had their turns.

sampling/mop.py chooses the prompts. A draw event names the turn of each slot and the floor at the draw. So the same
events give the same turns, whatever else happens between them.
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
        change_uses: adds a number to the uses of the rollouts at log positions [N].
        on_turns: called with a pool and the prompts [k] whose turns changed in it, or None if its floor changed.
    """

    def __init__(
        self, change_uses: Callable[[NDArray[np.uint64], int], None], on_turns: Callable[[int, Prompts | None], None]
    ) -> None:
        self._change_uses = change_uses
        self._on_turns = on_turns
        self.turns = np.zeros((2, 0), dtype=np.int64)
        """[2, P] turns, per pool (REPLAY, RECENT) and prompt number."""
        self.floors = np.zeros(2, dtype=np.int64)
        self._draws: dict[str, Drawn] = {}

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return self.turns.nbytes + sum(each.slots.nbytes + each.positions.nbytes for each in self._draws.values())

    def grow(self, num_prompts: int) -> None:
        """Add turn counts of 0, so that all prompt numbers below `num_prompts` have one."""
        if (more := num_prompts - self.turns.shape[1]) > 0:
            self.turns = np.concatenate([self.turns, np.zeros((2, more), dtype=np.int64)], axis=1)

    def is_due(self, pool: int, prompts: Prompts) -> NDArray[np.bool_]:
        """Return whether prompts [k] have had no more turns than the floor of the pool. [k]"""
        return self.turns[pool][prompts] <= self.floors[pool]

    def apply(self, event: DrawEvent) -> None:
        """Update turns, floors and uses by one event of the log."""
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
        """Pack turns, floors and draws, with the uses [N] of rollouts at log positions [N]; b"" if all are 0."""
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
        """Load turns, floors and draws from the bytes of `pack`; return the log positions [N] and uses [N] in them.

        Raises:
            ValueError: `pack` did not write these bytes.
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
    """Return (pool, its slots that took a turn) for each pool that has such slots."""
    slots, found = drawn.slots[drawn.slots["turn"] > 0], []
    for pool in (REPLAY, RECENT):
        if len(part := slots[slots["is_recent"] == pool]):
            found.append((pool, part))
    return found
