"""A chaos run from its start to its verdict.

start ... deal one card, or two at once -> hold -> end -> until all is well -> rest ... -> `tba stop` -> judge
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tba.api import RunCommand
from tba.errors import ServiceError
from tests.system.chaos.deployment import Deployment
from tests.system.chaos.faults import HOLD_S, Card, HungError, Strike, deck, strike
from tests.system.chaos.table import Trial
from tests.system.chaos.verdict import Verdict, judge, tracebacks
from tests.system.chaos.watch import Watch

TOGETHER_PROB = 0.25
"""Probability that two cards are dealt at once."""
RECOVERY_S = 300.0
"""Time until steps, heartbeats and pushes of all are there again; a fault that takes longer is not survived."""
END_S = 300.0
NUM_STEPS_AFTER = 3
REST_S = (0.0, 2.0)
Say = Callable[[str], None]


@dataclass
class Campaign:
    world: Deployment
    rng: random.Random
    say: Say = print
    hold_range_s: tuple[float, float] = HOLD_S
    trials: list[Trial] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    """Components that did not end on SIGTERM, and faults after which the run did not continue."""

    def run(self, cards: Sequence[Card] | None, *, seconds: float) -> Verdict:
        """Faults for so long (given cards: until they are dealt), then the end of the run, then the verdict."""
        world = self.world
        world.start()
        watch = Watch(world)
        try:
            self._until_steps(watch)
            deadline_s = time.monotonic() + seconds
            dealt = self._deal() if cards is None else iter([[card] for card in cards])
            for hand in dealt:
                if time.monotonic() > deadline_s:
                    break
                self._play(hand, watch)
                time.sleep(self.rng.uniform(*REST_S))
            verdict = self._end(watch)
        finally:
            watch.close()
        self._add_to(verdict, watch)
        return verdict

    def _deal(self) -> Iterator[list[Card]]:
        """Shuffled decks for ever; sometimes two cards of different places at once."""
        waiting: list[Card] = []
        while True:
            if len(waiting) < 2:
                fresh = deck()
                self.rng.shuffle(fresh)
                waiting += fresh
            hand = [waiting.pop(0)]
            if self.rng.random() < TOGETHER_PROB:
                other = next((card for card in waiting if card.place != hand[0].place), None)
                if other is not None:
                    waiting.remove(other)
                    hand.append(other)
            yield hand

    def _play(self, hand: Sequence[Card], watch: Watch) -> None:
        strikes = [strike(card, self.world, self.rng, self.hold_range_s) for card in hand]
        # faults that are waited for come last: a component may be unable to end for as long as another fault holds
        strikes.sort(key=lambda item: (item.waits, item.hold_s))
        begun_s = time.monotonic()
        for item in strikes:
            item.begin()
        held_s = []
        for item in strikes:
            time.sleep(max(0.0, begun_s + item.hold_s - time.monotonic()))
            self._lift(item)
            held_s.append(time.monotonic() - begun_s)
        ended_s = time.monotonic()
        missing, last = self._until_well(ended_s, watch)
        recovered_s = None if missing else time.monotonic() - ended_s
        if missing:
            what = " and ".join(f"{item.card.fault} of {item.hit}" for item in strikes)
            self.hung.append(f"{RECOVERY_S:.0f} s after {what}: {missing}")
        before = [acked.at_s for acked in self.world.observer.acks_since(begun_s - 60) if acked.at_s < begun_s][-1:]
        after = [acked.at_s for acked in self.world.observer.acks_since(begun_s)]
        times = [*before, *after] if after else [*before, time.monotonic()]
        pauses = [late - early for early, late in pairwise(times)]
        next_step_s = next((at_s - ended_s for at_s in after if at_s >= ended_s), None)
        for item, held in zip(strikes, held_s, strict=True):
            self.trials.append(
                Trial(item.card, item.hit, len(hand) > 1, held, max(pauses, default=0.0), next_step_s, recovered_s)
            )
        what = " + ".join(f"{item.card.fault} {item.hit}" for item in strikes)
        well = "NOT RECOVERED: " + missing if missing else f"well after {recovered_s:.1f} s (last: {last})"
        self.say(
            f"{len(self.trials):4} {what}: held {max(held_s):.1f} s, paused {max(pauses, default=0):.1f} s, {well}"
        )

    def _lift(self, item: Strike) -> None:
        try:
            item.end()
        except HungError as error:
            self.hung.append(str(error))

    def _until_well(self, since_s: float, watch: Watch) -> tuple[str, str]:
        """Wait until the run is as it was before: new steps, heartbeats and pushes of every process. Return the missing
        part, and the part that was missing last."""
        missing, last = "?", ""
        while missing and time.monotonic() < since_s + RECOVERY_S:
            time.sleep(0.05)
            last, missing = missing, self._missing(since_s, watch)
        return missing, last

    def _missing(self, since_s: float, watch: Watch) -> str:
        observer = self.world.observer
        if len(observer.acks_since(since_s)) < NUM_STEPS_AFTER:
            return "no new optimizer steps"
        silent = {"trainer", *self.world.searchers} - watch.alive(since_s)
        if silent:
            return f"no heartbeat of {', '.join(sorted(silent))}"
        idle = [name for name in self.world.searchers if observer.last_push_s[name] < since_s]
        if idle:
            return f"no push of {', '.join(idle)}"
        try:
            num_pending = self.world.client.stats().num_pending
        except ServiceError as error:
            return str(error)
        return f"{num_pending} rollouts without a score" if num_pending else ""

    def _until_steps(self, watch: Watch) -> None:
        missing, _ = self._until_well(time.monotonic(), watch)
        words = {name: item.last_words()[-600:] for name, item in self.world.supervisor.components.items()}
        assert not missing, f"training did not begin within {RECOVERY_S:.0f} s: {missing}\n{words}"

    def _end(self, watch: Watch) -> Verdict:
        world = self.world
        self._until("every rollout is scored", lambda: world.client.stats().num_pending == 0)
        world.supervisor.may_end.set()
        self._until("`stop` is taken", lambda: world.client.command("stop", RunCommand(reason="enough")) is not None)
        self._until("the run is done", lambda: world.client.run().state == "done")
        ending = [world.supervisor.components[name] for name in ("trainer", *world.searchers)]
        self._until("trainer and searchers end", lambda: all(component.is_done for component in ending))
        return judge(world, world.client.run())

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + END_S
        while time.monotonic() < deadline_s:
            try:
                if condition():
                    return
            except ServiceError:
                pass
            time.sleep(0.1)
        self.hung.append(f"within {END_S:.0f} s it was never true that {what}")

    def _add_to(self, verdict: Verdict, watch: Watch) -> None:
        world = self.world
        verdict.wrong += self.hung
        verdict.wrong += [f"{wait}: {late}" for wait, late in watch.overdue.items()]
        verdict.wrong += [
            f"{name}: {len(ends)} kinds of tracebacks, for example {ends[:3]}"
            for name, ends in tracebacks(world.log_folder).items()
        ]
        verdict.counts |= {
            "process starts": {name: item.num_starts for name, item in world.supervisor.components.items()},
            "ended by themselves": [
                f"{end.name}: {end.exit_code}: {end.last_line}" for end in world.supervisor.endings
            ],
            "answers of GET /v1/run": watch.num_answers,
            "without an answer": watch.num_silences,
            "seconds of each wait": dict(watch.waits.most_common()),
            "requests through the relays": world.buffer_relay.num_requests + world.store_relay.num_requests,
            "connections through links": sum(link.num_connections for link in world.links.values()),
        }


def run_campaign(
    folder: Path,
    model: Path,
    *,
    seed: int,
    seconds: float,
    cards: Sequence[Card] | None = None,
    num_searchers: int = 3,
    hold_range_s: tuple[float, float] = HOLD_S,
    say: Say = print,
) -> tuple[Verdict, list[Trial]]:
    world = Deployment(folder, model, num_searchers=num_searchers)
    campaign = Campaign(world, random.Random(seed), say, hold_range_s)
    try:
        return campaign.run(cards, seconds=seconds), campaign.trials
    finally:
        world.close()
