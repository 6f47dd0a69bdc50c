"""Leases: which searcher works on which visit or evaluation unit until when.

A visit is fulfilled once `rollouts_per_visit` rollouts that name it are stored, in one push or several, from any
searcher. A lease that ends earlier leaves the rest: the next lease of that visit asks for the missing rollouts only.
Evaluation units come before visits, returned and expired visits before new ones. A live searcher renews its leases, so
a visit may take longer than `lease_s`. A visit that cannot be sampled (refused) ends. A prompt may be on lease any
number of times at once, each time for another visit.

A request may be held here until flow control allows rollouts (run/state.py), or until an evaluation, a new version or
the end of the run. At most MAX_HELD requests are held; others are answered at once. Held requests share the allowance.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from tba.api import Lease, LeaseRenewal, LeaseRenewalReply, LeaseReply, LeaseRequest, LeaseReturn
from tba_buffer.prompts.catalog import Catalog, VisitCursor, VisitOrder
from tba_buffer.prompts.evaluation_summary import EvaluationUnit, StoredEval
from tba_buffer.prompts.evaluations import Evaluations
from tba_buffer.run.state import FlowSettings, RunSnapshot, RunStateReader, generation_room
from tba_buffer.storage.context import Context, needed, unreadable
from tba_buffer.storage.redis_client import redis_errors

MIN_RETRY_S = 0.25
MAX_RETRY_S = 10.0
MAX_POLLS_PER_S = 100.0
"""Most empty replies per second to all searchers together, without held requests. A reply costs the buffer about 1 ms,
so they take a tenth of its one core."""
MAX_HELD = 16
"""Most requests that are held at the same time; each reads the state of the run again after every change."""
POLL_S = 0.25
"""A held request looks again after this long even if nothing was notified. Leases may have expired, rollouts may have
been evicted, and another buffer process may have changed the run."""
ATTEMPTS = 3


class Leases:
    """Leases visits and evaluation units to searchers."""

    def __init__(
        self, context: Context, *, catalog: Catalog, evaluations: Evaluations, run_state: RunStateReader
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._evaluations = evaluations
        self._run_state = run_state
        self._lock = asyncio.Lock()
        self._held: dict[int, int] = {}
        """The `min_leases` of each held request, by the request's id()."""
        self._poll_backoff = PollBackoff()
        self._order = VisitOrder(catalog, context.recipe)
        self._flow = FlowSettings.of(context.recipe)

    async def lease(self, request: LeaseRequest, is_gone: Callable[[], Awaitable[bool]] | None = None) -> LeaseReply:
        """Claim up to `max_leases` evaluation units and visits. A repeated request gets the same leases again.

        Args:
            request: says how long it may be held (`wait_s`), and how many visits it wants.
            is_gone: returns whether the client has hung up; asked after each pause, so that no lease goes to nobody.
        """
        begin_s = time.monotonic()
        is_held = request.wait_s > 0 and len(self._held) < MAX_HELD
        if is_held:
            self._held[id(request)] = request.min_leases
        try:
            leases, wait, snapshot = await self._wait_for_leases(request, begin_s if is_held else None, is_gone)
        finally:
            self._held.pop(id(request), None)
        if leases:
            self._poll_backoff.record_served(request.searcher_id)
            retry_after_s = 0.0
        else:
            now_s = time.monotonic()
            # what it was held counts as a part of the pause
            retry_after_s = max(self._poll_backoff.record_empty(request.searcher_id, now_s) - (now_s - begin_s), 0.0)
        return LeaseReply(
            leases=leases,
            latest_version=snapshot.sampling_version,
            run_state=snapshot.state,
            wait=None if leases else wait,
            retry_after_s=retry_after_s,
        )

    async def _wait_for_leases(
        self, request: LeaseRequest, begin_s: float | None, is_gone: Callable[[], Awaitable[bool]] | None
    ) -> tuple[list[Lease], str | None, RunSnapshot]:
        """Try to claim leases, until `wait_s` seconds after `begin_s` at most (None: try once).

        A new version or the end of the run also ends the wait.

        Returns:
            The leases, the name of what the request waits for (None: nothing), and the state of the run.
        """
        deadline_s = -math.inf if begin_s is None else begin_s + request.wait_s
        next_claim_s = -math.inf
        while True:
            changed = self._context.leasable.ticket  # before the attempt: a change during it ends the wait at once
            now_s = time.monotonic()
            leases, wait, snapshot = await self._attempt(
                request, min_leases=request.min_leases if now_s < deadline_s else 1, always=now_s >= next_claim_s
            )
            is_new = snapshot.sampling_version not in (None, request.known_version)
            if leases or is_new or snapshot.state in ("done", "failed") or now_s >= deadline_s:
                return leases, wait, snapshot
            if now_s >= next_claim_s:
                next_claim_s = now_s + POLL_S
            await self._context.leasable.wait(changed, min(deadline_s - now_s, POLL_S))
            if is_gone is not None and await is_gone():
                return [], wait, snapshot

    async def _attempt(
        self, request: LeaseRequest, *, min_leases: int, always: bool
    ) -> tuple[list[Lease], str | None, RunSnapshot]:
        """Claim evaluation units, and visits if flow control allows `min_leases` of them; return as `_wait_for_leases`.

        Args:
            always: run lease.lua even if it allows fewer: the script grants evaluation units, ends expired leases, and
                answers a repeated request.
        """
        async with self._lock:  # one at a time: a claim takes room away from the next request
            snapshot = await self._run_state.read()
            room: int | None = 0
            if snapshot.state != "running":
                wait: str | None = f"run-{snapshot.state}"
            elif snapshot.sampling_version is None:
                wait = "no-version"  # nothing was announced yet, so no searcher has weights to sample with
            elif not self._catalog.train:
                wait = "no-prompts"
            else:
                room, wait = generation_room(snapshot.counts, self._flow)
            # a stopping run still evaluates, without room for visits
            if snapshot.state not in ("running", "stopping"):
                return [], wait, snapshot
            # with news the request is answered in any case, so it takes what there is
            if snapshot.sampling_version not in (None, request.known_version):
                min_leases = 1
            num_visits = request.max_leases if room is None else self._num_visits(room)
            is_enough = num_visits >= min(min_leases, request.max_leases)
            if not is_enough and not always:
                return [], wait, snapshot
            # searchers ask for rounds ahead: the first would take all, and those that wait with it would stand still
            others = [num for held, num in self._held.items() if held != id(request)]
            share = max(math.ceil(num_visits / (len(others) + 1)), request.min_leases)
            # what is left must be of use to one of the others
            is_shared = room is not None and others and num_visits - share >= min(others)
            room = room if wait is None and is_enough else 0
            max_train = share if is_shared else num_visits
            return await self._claim(request, room, snapshot, max_train=max_train), wait, snapshot

    def _num_visits(self, room: int) -> int:
        # rounded up: a visit is leased as a whole, and may exceed the room by a part of itself
        return math.ceil(room / self._context.recipe.sampling.rollouts_per_visit)

    async def give_back(self, request: LeaseReturn) -> None:
        """End leases of a searcher before their deadline. Missing rollouts are leased again; refused visits are not."""
        await self._context.scripts.run(
            "return", searcher_id=request.searcher_id, returned=request.lease_ids, refused=request.refused_lease_ids
        )
        self._context.leasable.notify()

    async def renew(self, request: LeaseRenewal) -> LeaseRenewalReply:
        """Set the deadline of a searcher's leases to `lease_s` from now. The reply names leases it no longer holds."""
        deadline_s = self._context.clock() + self._context.recipe.buffer.lease_s
        lost = await self._context.scripts.run(
            "renew", searcher_id=request.searcher_id, deadline_s=deadline_s, lease_ids=request.lease_ids
        )
        return LeaseRenewalReply(lost_lease_ids=[lease_id.decode() for lease_id in lost])

    async def _claim(
        self, request: LeaseRequest, room: int | None, snapshot: RunSnapshot, *, max_train: int
    ) -> list[Lease]:
        now, sampling = self._context.clock(), self._context.recipe.sampling
        lease_s, num_visit = self._context.recipe.buffer.lease_s, sampling.rollouts_per_visit
        max_train = min(max_train, request.max_leases if room is None else self._num_visits(room))
        # the same ids however often the request is sent: by them lease.lua finds what a lost reply had granted
        digest = hashlib.sha256(json.dumps([request.searcher_id, request.request_id]).encode()).hexdigest()[:20]
        lease_ids = [f"lease-{digest}-{i}" for i in range(request.max_leases)]
        # another process may move the cursor before lease.lua runs; the candidates are then of visits that are taken
        for _ in range(ATTEMPTS):
            with redis_errors("read the cursor"):
                cursor = (await self._context.redis.get(self._context.keys.cursor)) or b""
            parse = partial(VisitCursor.parse, cursor, len(self._catalog.train))
            begin = needed(self._context.keys.cursor, "cursor", parse) if cursor else None
            candidates = self._order.next(begin, max_train, snapshot.index)
            moved, *flat = await self._context.scripts.run(
                "lease",
                now_s=now,
                deadline_s=now + lease_s,
                searcher_id=request.searcher_id,
                rollouts_per_visit=num_visit,
                lease_ids=lease_ids,
                max_train=max_train,
                room=room,
                cursor=cursor,
                candidates=[part for c in candidates for part in (c.visit_id, c.prompt_id, c.cursor_after)],
                refused_versions=request.refused_versions,
            )
            if flat or not moved:
                return await self._leases(flat, lease_s, snapshot.settings.recipe.searcher.sampling_temperature)
        return []

    async def _leases(self, flat: list[bytes | int], lease_s: float, temperature: float) -> list[Lease]:
        """Build leases from the reply of lease.lua. Per lease: kind, lease id, visit or unit, prompt id, rollouts."""
        texts = [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in flat]
        rows = [texts[at : at + 5] for at in range(0, len(texts), 5)]
        eval_ids = sorted({subject.partition("|")[0] for kind, _, subject, _, _ in rows if kind == "eval"})
        documents = await self._evaluations.documents(eval_ids) if eval_ids else {}
        leases = []
        for kind, lease_id, subject, prompt_id, num in rows:
            if kind == "eval":
                read = partial(self._eval_lease, lease_id, subject, documents, lease_s)
                leases.append(needed(self._context.keys.eval_todo, subject, read))
                continue
            found = self._catalog.find(prompt_id)
            if found is None:
                missing = LookupError(f"prompt {prompt_id!r} is not stored")
                raise unreadable(self._context.keys.visits, subject, missing)
            leases.append(
                Lease(
                    lease_id=lease_id,
                    kind="train",
                    visit_id=subject,
                    prompt=found[1],
                    num_rollouts=int(num),
                    temperature=temperature,
                    expires_in_s=lease_s,
                )
            )
        return leases

    def _eval_lease(self, lease_id: str, text: str, documents: Mapping[str, StoredEval], lease_s: float) -> Lease:
        unit = EvaluationUnit.parse(text)
        document, is_greedy = documents[unit.eval_id], unit.kind == "greedy"
        return Lease(
            lease_id=lease_id,
            kind="greedy" if is_greedy else "sample",
            visit_id=f"{unit.eval_id}-{unit.kind}-{unit.number}",
            prompt=self._catalog.heldout[unit.number],
            num_rollouts=1 if is_greedy else document.num_samples,
            temperature=0.0 if is_greedy else self._context.recipe.model.policy_temperature,
            expires_in_s=lease_s,
            eval_id=unit.eval_id,
            version=document.version,
        )


class PollBackoff:
    """Spaces out the requests of searchers without work, so that hundreds of them do not overload the buffer."""

    def __init__(self) -> None:
        self._polled_at_s: OrderedDict[str, float] = OrderedDict()
        """Searcher id -> monotonic time of its last empty reply, oldest first."""

    def record_empty(self, searcher_id: str, now_s: float) -> float:
        """Record that a searcher got nothing. Return the seconds after which it may ask again.

        Args:
            searcher_id: the searcher.
            now_s: monotonic time.
        """
        self._polled_at_s[searcher_id] = now_s
        self._polled_at_s.move_to_end(searcher_id)
        retry_s = min(max(MIN_RETRY_S, len(self._polled_at_s) / MAX_POLLS_PER_S), MAX_RETRY_S)
        # a searcher that has not asked for so long is gone, or busy elsewhere
        while next(iter(self._polled_at_s.values())) < now_s - 2 * retry_s - 1.0:
            self._polled_at_s.popitem(last=False)
        return retry_s

    def record_served(self, searcher_id: str) -> None:
        """Record that a searcher got work: it does not wait any more."""
        self._polled_at_s.pop(searcher_id, None)
