"""`python -m tba_buffer.rehearsal --config FILE --load JSON`: the flow of a run in simulated time, as JSON.

Flow control, index, MOP and turns are the buffer's own code, in memory. Searchers, trainer and store are clocks:

    searcher    every slot decodes tokens_per_s / num_slots; a visit arrives when its last response ends; with
                `sampling.alternate` no response begins while a version is read
    trainer     takes step_s for each step, draws as many batches ahead as the recipe says, and stands still while
                `trainer.max_unpublished_versions` wait to be written
    store       a version is written, announced, then read by all searchers, each at bytes_per_s

Prompts, scoring and network latency take no time, nobody fails, and nothing is evicted but what is too old. Lengths are
those of the simulated engine: log-normal, cut at the limit. The load is assumed, never measured.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.config import Recipe, load_recipe
from tba.versions import PolicyVersion
from tba_buffer.index.log import RECORD_DTYPE, SCORED, Evicted, Publication, RolloutsAdded
from tba_buffer.index.rollout_index import Index, IndexSettings
from tba_buffer.run.state import FlowCounts, FlowSettings, generation_room, sampling_wait
from tba_buffer.sampling.mop import DrawSettings, draw_slots, drawn_event

MAX_ROLLOUTS = 40_000
"""The rehearsal ends when so many were generated, even before `num_steps`."""
LENGTH_SIGMA = 0.8
"""Standard deviation of the logarithm of a length, as of the simulated engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is assumed of machines and data."""

    tokens_per_s: float
    """Of a searcher with all slots busy."""
    step_s: float
    bytes_per_s: float
    """Of the store, for the trainer and for each searcher."""
    version_bytes: int
    response_tokens: float
    """The median."""
    num_prompts: int
    num_steps: int


@dataclass(slots=True)
class _Searcher:
    version: int = 0
    num_free: int = 0
    visit: _Visit | None = None
    """The visit whose requests are handed to free slots."""
    is_pulling: bool = False


@dataclass(slots=True)
class _Visit:
    prompt: int
    size: int
    num_started: int = 0
    versions: list[int] = field(default_factory=list)
    """Of the responses that have ended."""
    lengths: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    versions: NDArray[np.int64]
    num_slots: int
    num_recent: int
    num_fallbacks: int


class FlowRehearsal:
    """A run in simulated time.

    Args:
        recipe: its sections sampling, buffer, searcher and trainer are read.
        load: what is assumed.
    """

    def __init__(self, recipe: Recipe, load: Load) -> None:
        self._recipe, self._load = recipe, load
        self._settings = FlowSettings.of(recipe)
        self._index = Index(IndexSettings.of(recipe))
        self._rng = np.random.default_rng(recipe.run.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._prompts = count(), count()
        self._now_s = self._busy_slot_s = 0.0
        self._searchers = [_Searcher(num_free=recipe.searcher.num_slots) for _ in range(recipe.searcher.num_searchers)]
        self._step = self._announced = 0
        self._published = [0]
        self._unpublished: deque[int] = deque()
        """Steps whose weights are not announced yet."""
        self._batches: deque[_Drawn] = deque()
        self._num_drawn_batches = self._num_inserted = self._num_leased = self._num_too_old = 0
        self._inserted_at_mark = self._batches_at_mark = 0
        self._is_training = self._is_blocked = False
        self._waiting: tuple[float, str] = (0.0, "rollouts")
        self._waits_s: defaultdict[str, float] = defaultdict(float)
        self._consumed: list[_Drawn] = []
        self._used: set[int] = set()
        """Positions of the rollouts that were in a batch."""
        self._ages: list[NDArray[np.int64]] = []
        self._first_step_s: float | None = None

    def run(self) -> dict[str, Any]:
        """Return what came of it."""
        self._index.apply(Publication(1, PolicyVersion(1, 0)))
        for searcher in self._searchers:
            self._fill(searcher)
        most = self._load.num_steps
        while self._step < most and self._events and self._num_inserted < MAX_ROLLOUTS:
            time_s, _, event = heapq.heappop(self._events)
            num_busy = sum(self._recipe.searcher.num_slots - each.num_free for each in self._searchers)
            self._busy_slot_s += num_busy * (time_s - self._now_s)
            self._now_s = time_s
            event()
        return self._report()

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._numbers), event))

    def _counts(self) -> FlowCounts:
        index, size = self._index, self._settings.batch_rollouts
        return FlowCounts(
            stored=index.num_scored - index.num_used_up,
            pending=0,
            can_fill_slot=index.num_drawable > 0,
            inserted=self._num_inserted,
            leased=self._num_leased,
            drawn=self._num_drawn_batches * size,
            inserted_since_publication=self._num_inserted - self._inserted_at_mark,
            batches_since_publication=self._num_drawn_batches - self._batches_at_mark,
            publications=len(self._published),
            used_up=index.num_used_up,
        )

    # ---- searchers ----------------------------------------------------------------------------------------------

    def _fill(self, searcher: _Searcher) -> None:
        """Start requests in the free slots, as far as the buffer leases visits."""
        searching, load = self._recipe.searcher, self._load
        if self._recipe.sampling.alternate and searcher.is_pulling:
            return  # a phase has one version
        while searcher.num_free:
            visit = searcher.visit
            if visit is None or visit.num_started == visit.size:
                room, _ = generation_room(self._counts(), self._settings)
                if room == 0:
                    return
                size = self._recipe.sampling.rollouts_per_visit
                visit = searcher.visit = _Visit(next(self._prompts) % load.num_prompts, size)
                self._num_leased += size
            visit.num_started += 1
            searcher.num_free -= 1
            length = load.response_tokens * math.exp(LENGTH_SIGMA * self._rng.standard_normal())
            num_tokens = max(1, min(round(length), searching.max_response_tokens))
            duration_s = num_tokens * searching.num_slots / load.tokens_per_s
            self._at(
                duration_s, lambda s=searcher, v=visit, at=searcher.version, n=num_tokens: self._ended(s, v, at, n)
            )

    def _ended(self, searcher: _Searcher, visit: _Visit, version: int, num_tokens: int) -> None:
        visit.versions.append(version)
        visit.lengths.append(num_tokens)
        searcher.num_free += 1
        if len(visit.versions) == visit.size:
            self._push(visit)
        self._fill(searcher)

    def _push(self, visit: _Visit) -> None:
        records = np.zeros(visit.size, dtype=RECORD_DTYPE)
        records["reward"], records["status"] = self._rng.standard_normal(visit.size), SCORED
        records["lineage"], records["step"], records["prompt"] = 1, visit.versions, visit.prompt
        records["num_bytes"], records["num_tokens"] = 1, visit.lengths
        first = self._index.position + 1
        # an id of its own for each: its position
        records["rollout_id"] = [(first + i).to_bytes(16, "big") for i in range(visit.size)]
        self._index.apply(RolloutsAdded(first, records))
        self._num_leased -= visit.size
        self._num_inserted += visit.size
        self._evict()
        self._draw()

    def _evict(self) -> None:
        """Drop what is older than `buffer.max_policy_age_steps`."""
        limit, index = self._recipe.buffer.max_policy_age_steps, self._index
        if limit is None:
            return
        rows = index.live_rows()
        old = rows[self._step - index.column("step", rows).astype(np.int64) > limit]
        if len(old):
            positions = index.column("position", old).astype("<u8")
            self._num_too_old += len(set(positions.tolist()) - self._used)
            index.apply(Evicted(index.position + 1, positions, "policy_age"))

    def _pull(self, searcher: _Searcher) -> None:
        """Read the version that searchers sample with, if this one has another."""
        wanted = max(v for v in self._published if v <= max(0, self._announced - self._recipe.sampling.lag_steps))
        if searcher.is_pulling or wanted == searcher.version:
            return

        def loaded() -> None:
            searcher.version, searcher.is_pulling = wanted, False
            self._pull(searcher)
            self._fill(searcher)

        searcher.is_pulling = True
        self._at(self._load.version_bytes / self._load.bytes_per_s, loaded)

    # ---- trainer ------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw what may be drawn ahead, and begin a step if one waits for it."""
        recipe, index = self._recipe, self._index
        most = self._step + 1 + recipe.trainer.prefetch_batches
        while self._num_drawn_batches < most and sampling_wait(self._counts(), self._settings) is None:
            step = self._num_drawn_batches + 1
            slots = draw_slots(index, DrawSettings.of(recipe, step=step), int(self._rng.integers(2**62)))
            kept = [slot for slot in slots if not slot.left_out]
            self._batches.append(
                _Drawn(
                    versions=np.concatenate([index.column("step", s.rows) for s in kept]).astype(np.int64),
                    num_slots=len(kept),
                    num_recent=sum(slot.source == "recent" for slot in kept),
                    num_fallbacks=sum(slot.fallback for slot in kept),
                )
            )
            drawn = drawn_event(index, slots, f"{step}", PolicyVersion(1, step))
            self._used.update(drawn.positions.tolist())
            index.apply(drawn)
            self._num_drawn_batches += 1
            for searcher in self._searchers:  # flow control may have left them without work
                self._fill(searcher)
        if self._batches and not self._is_training and not self._is_blocked:
            self._begin()

    def _begin(self) -> None:
        since_s, name = self._waiting
        if self._first_step_s is None:
            self._first_step_s = self._now_s
        else:
            self._waits_s[name] += self._now_s - since_s
        batch = self._batches.popleft()
        self._consumed.append(batch)
        self._ages.append(self._step - batch.versions)
        self._is_training = True
        self._at(self._load.step_s, self._end)

    def _end(self) -> None:
        self._step, self._is_training = self._step + 1, False
        if self._step % self._recipe.trainer.sync_interval == 0:
            self._unpublished.append(self._step)
            if len(self._unpublished) == 1:
                self._write()
        self._evict()
        self._is_blocked = len(self._unpublished) > self._recipe.trainer.max_unpublished_versions
        self._waiting = (self._now_s, "unpublished-versions" if self._is_blocked else self._wait_of_a_draw())
        self._draw()
        for searcher in self._searchers:
            self._fill(searcher)

    def _wait_of_a_draw(self) -> str:
        return sampling_wait(self._counts(), self._settings) or "draw"

    def _write(self) -> None:
        """Write the oldest of the versions that are not announced yet."""
        self._at(self._load.version_bytes / self._load.bytes_per_s, self._announce)

    def _announce(self) -> None:
        step = self._unpublished.popleft()
        if self._unpublished:
            self._write()
        self._index.apply(Publication(self._index.position + 1, PolicyVersion(1, step)))
        self._announced = step
        self._published.append(step)
        self._inserted_at_mark, self._batches_at_mark = self._num_inserted, self._num_drawn_batches
        for searcher in self._searchers:
            self._pull(searcher)
            self._fill(searcher)
        if self._is_blocked:  # a place is free again
            since_s, name = self._waiting
            self._waits_s[name] += self._now_s - since_s
            self._is_blocked, self._waiting = False, (self._now_s, self._wait_of_a_draw())
        self._draw()

    # ---- report -------------------------------------------------------------------------------------------------

    def _report(self) -> dict[str, Any]:
        ages = np.concatenate(self._ages) if self._ages else np.zeros(0, dtype=np.int64)
        num_slots = sum(batch.num_slots for batch in self._consumed)
        if self._first_step_s is not None and not self._is_training:  # a wait that has not ended
            since_s, name = self._waiting
            self._waits_s[name] += self._now_s - since_s
        train_s = self._now_s - (self._first_step_s or 0.0)
        capacity = len(self._searchers) * self._recipe.searcher.num_slots * self._now_s
        version_s = self._load.version_bytes / self._load.bytes_per_s
        return {
            "num_steps": self._step,
            # nothing can happen any more: all sides wait for each other
            "stalled_by": self._waiting[1] if not self._events and self._step < self._load.num_steps else None,
            "is_cut_short": bool(self._events) and self._step < self._load.num_steps,
            "first_step_s": self._first_step_s,
            "steps_per_hour": 3600 * self._step / train_s if train_s else None,
            "trainer_wait_share": sum(self._waits_s.values()) / train_s if train_s else None,
            "trainer_waits_s": dict(self._waits_s),
            "slot_busy_share": self._busy_slot_s / capacity if capacity else None,
            "policy_age_mean_steps": float(ages.mean()) if len(ages) else None,
            "policy_age_p95_steps": float(np.quantile(ages, 0.95)) if len(ages) else None,
            "policy_age_max_steps": int(ages.max()) if len(ages) else None,
            "realised_m": sum(batch.num_recent for batch in self._consumed) / num_slots if num_slots else None,
            "fallback_share": sum(b.num_fallbacks for b in self._consumed) / num_slots if num_slots else None,
            "num_rollouts": self._num_inserted,
            "generated_per_trained": (
                self._num_inserted / (self._step * self._settings.batch_rollouts) if self._step else None
            ),
            # of the rollouts that were never in a batch
            "evicted_unused_share": self._num_too_old / self._num_inserted if self._num_inserted else None,
            "publish_s": version_s,
            "pull_s": version_s,
            "sync_s": self._recipe.trainer.sync_interval * self._load.step_s,
        }


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tba_buffer.rehearsal", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe (TOML) or resolved config (JSON)")
    parser.add_argument("--load", required=True, metavar="JSON", help="the fields of `Load`")
    args = parser.parse_args()
    print(json.dumps(FlowRehearsal(load_recipe(args.config), Load(**json.loads(args.load))).run()))


if __name__ == "__main__":
    main()
