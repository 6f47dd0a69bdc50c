"""Leases: who works on which visit or evaluation unit until when. Expired and returned ones are given out again.

A visit is fulfilled once `rollouts_per_visit` rollouts that name it are stored, in one push or several, from whoever
sampled them. A lease that ends earlier leaves the rest: the next lease of that visit asks for the missing rollouts
only. Evaluation units come before visits; returned and expired visits before new ones. A searcher that is alive renews
its leases, so a visit may take longer than `lease_s`; a visit that cannot be sampled (refused) ends. A prompt may be
on lease any number of times at once, each time for another visit. A request that is sent again, because its reply was
lost, is answered with the leases that it was granted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from typing import Any

from tba.api import Lease, LeaseRenewal, LeaseRenewalReply, LeaseReply, LeaseRequest, LeaseReturn
from tba_buffer.askers import Askers
from tba_buffer.context import Context
from tba_buffer.eval_units import Unit
from tba_buffer.evals import Evals
from tba_buffer.flow import FlowSettings, generation_room
from tba_buffer.glance import Glance, Glances
from tba_buffer.prompts import UNREADABLE, Catalog, Place, VisitOrder, read_place
from tba_buffer.redis_link import redis_errors

ATTEMPTS = 3


class Leases:
    """Gives out work.

    Args:
        context: Redis and settings.
        catalog: the prompts.
        evals: the evaluations.
        glances: the state of the run and the counts of flow control.
    """

    def __init__(self, context: Context, *, catalog: Catalog, evals: Evals, glances: Glances) -> None:
        self._context = context
        self._catalog = catalog
        self._evals = evals
        self._glances = glances
        self._lock = asyncio.Lock()
        self._askers = Askers()
        self._order = VisitOrder(catalog, context.recipe)
        self._flow = FlowSettings.of(context.recipe)
        keys = context.keys
        self._keys = [
            keys.visits,
            keys.returned,
            keys.leases,
            keys.lease_deadlines,
            keys.cursor,
            keys.counters,
            keys.evals,
            keys.eval_todo,
            keys.eval_units,
            keys.eval_results,
            keys.run,
            keys.settings,
            keys.settings_changes,
            keys.settings_effects,
            keys.unreadable,
        ]

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Claim up to `max_leases` evaluation units and visits; what the same request was granted before, if anything.

        Raises:
            UnavailableError: Redis did not answer.
        """
        leases: list[Lease] = []
        async with self._lock:  # what one request takes is no longer room for the next
            glance = await self._glances.read()
            room, wait = self._room(glance)
            if glance.state in ("running", "stopping"):
                leases = await self._claim(request, room if wait is None else 0, glance)
        if leases:
            self._askers.served(request.searcher_id)
            retry_after_s = 0.0
        else:
            retry_after_s = self._askers.in_vain(request.searcher_id, time.monotonic())
        return LeaseReply(
            leases=leases,
            latest_version=glance.latest_version,
            run_state=glance.state,
            wait=None if leases else wait,
            retry_after_s=retry_after_s,
            num_version_retries=glance.num_retries,
        )

    async def give_back(self, request: LeaseReturn) -> None:
        """End leases of this searcher before their deadline; what they owed is leased again, refused visits are not.

        Raises:
            UnavailableError: Redis did not answer.
        """
        returned, refused = request.lease_ids, request.refused_lease_ids
        args = [request.searcher_id, len(returned), *returned, *refused]
        await self._context.scripts.run("return", self._keys, args)

    async def renew(self, request: LeaseRenewal) -> LeaseRenewalReply:
        """Give leases of this searcher a new deadline; names those that it holds no more.

        Raises:
            UnavailableError: Redis did not answer.
        """
        keys, deadline_s = self._context.keys, self._context.clock() + self._context.recipe.buffer.lease_s
        args = [request.searcher_id, deadline_s, *request.lease_ids]
        names = [keys.leases, keys.lease_deadlines, keys.counters, keys.unreadable]
        lost = await self._context.scripts.run("renew", names, args)
        return LeaseRenewalReply(lost_lease_ids=[lease_id.decode() for lease_id in lost])

    def _room(self, glance: Glance) -> tuple[int | None, str | None]:
        if glance.state != "running":
            return 0, f"run-{glance.state}"
        if glance.latest_version is None:
            return 0, "no-version"
        if not self._catalog.train:
            return 0, "no-prompts"
        return generation_room(glance.counts, self._flow)

    async def _claim(self, request: LeaseRequest, room: int | None, glance: Glance) -> list[Lease]:
        now, sampling = self._context.clock(), self._context.recipe.sampling
        lease_s, num_visit = self._context.recipe.buffer.lease_s, sampling.rollouts_per_visit
        max_train = request.max_leases if room is None else min(request.max_leases, math.ceil(room / num_visit))
        lease_ids = ids_of(request)
        for _ in range(ATTEMPTS):
            with redis_errors("read the cursor"):
                cursor = (await self._context.redis.get(self._context.keys.cursor)) or b""
            candidates = self._order.next(self._place(cursor), max_train, glance.index)
            moved, *flat = await self._context.scripts.run(
                "lease",
                self._keys,
                [
                    now,
                    now + lease_s,
                    request.searcher_id,
                    num_visit,
                    request.max_leases,
                    max_train,
                    -1 if room is None else room,
                    cursor,
                    len(candidates),
                    glance.live.revision,
                    *lease_ids,
                    *(part for c in candidates for part in (c.visit_id, c.prompt_id, c.cursor_after)),
                    *request.refused_versions,
                ],
            )
            if flat or not moved:
                sampling_temperature = glance.live.recipe.searcher.sampling_temperature.at(glance.step)
                leases, damaged = await self._leases(flat, lease_s, sampling_temperature)
                if damaged:
                    await self._drop(request.searcher_id, damaged)
                if leases or not damaged:
                    return leases
        return []

    def _place(self, cursor: bytes) -> Place | None:
        """Where the order of visits stands; a damaged cursor begins a new epoch, which is none that has been."""
        if not cursor:
            return None
        place = self._context.read_or_note("cursor", "cursor", lambda: read_place(cursor, len(self._catalog.train)))
        return place or Place(epoch=int(self._context.clock()), offset=0, size=len(self._catalog.train))

    async def _drop(self, searcher_id: str, damaged: dict[str, str]) -> None:
        """End leases of what nobody can work on, by id; the unit or visit of each is not leased again."""
        await self._context.scripts.run("return", self._keys, [searcher_id, 0, *damaged])
        with redis_errors("drop damaged units"):
            async with self._context.redis.pipeline(transaction=False) as pipe:
                for subject in damaged.values():
                    pipe.lrem(self._context.keys.eval_todo, 0, subject)
                await pipe.execute()

    async def _leases(
        self, flat: list[bytes | int], lease_s: float, sampling_temperature: float
    ) -> tuple[list[Lease], dict[str, str]]:
        """The leases; and lease id -> visit or unit of those that name what is not there, or cannot be read."""
        rows = [tuple(_text(value) for value in flat[at : at + 5]) for at in range(0, len(flat), 5)]
        documents = await self._evals.documents(sorted({_eval_id(row[2]) for row in rows if row[0] == "eval"}))
        leases: list[Lease] = []
        damaged: dict[str, str] = {}
        for kind, lease_id, subject, prompt_id, num in rows:
            if kind == "train":
                lease = self._train_lease(lease_id, subject, prompt_id, int(num), sampling_temperature, lease_s)
            else:
                lease = self._eval_lease(lease_id, subject, documents.get(_eval_id(subject)), lease_s)
            if lease is None:
                damaged[lease_id] = subject
            else:
                leases.append(lease)
        return leases, damaged

    def _train_lease(
        self, lease_id: str, visit_id: str, prompt_id: str, num: int, temperature: float, lease_s: float
    ) -> Lease | None:
        found = self._catalog.find(prompt_id)
        if found is None or found[1].task == UNREADABLE:
            why = f"its prompt {prompt_id!r} is not there, or cannot be read"
            self._context.unreadable.note("visit", visit_id, why, at_s=self._context.clock())
            return None
        return Lease(
            lease_id=lease_id,
            kind="train",
            visit_id=visit_id,
            prompt=found[1],
            num_rollouts=num,
            temperature=temperature,
            expires_in_s=lease_s,
        )

    def _eval_lease(self, lease_id: str, text: str, document: dict[str, Any] | None, lease_s: float) -> Lease | None:
        if document is None:  # it is noted as an evaluation that cannot be read
            return None

        def read() -> Lease:
            unit = Unit.parse(text)
            return Lease(
                lease_id=lease_id,
                kind="greedy" if unit.kind == "greedy" else "sample",
                visit_id=f"{unit.eval_id}-{unit.kind}-{unit.number}",
                prompt=self._catalog.heldout[unit.number],
                num_rollouts=1 if unit.kind == "greedy" else document["num_samples"],
                temperature=0.0 if unit.kind == "greedy" else self._context.recipe.model.policy_temperature,
                expires_in_s=lease_s,
                eval_id=unit.eval_id,
                version=document["version"],
            )

        return self._context.read_or_note("unit", text, read)


def ids_of(request: LeaseRequest) -> list[str]:
    """The ids of the leases that a request may be granted: the same ones however often it is sent."""
    request_digest = hashlib.sha256(json.dumps([request.searcher_id, request.request_id]).encode()).hexdigest()[:20]
    return [f"lease-{request_digest}-{i}" for i in range(request.max_leases)]


def _eval_id(unit: str) -> str:
    return unit.partition("|")[0]


def _text(value: bytes | int) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
