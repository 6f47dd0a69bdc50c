"""Evaluations: searchers answer held-out prompts with the weights of one version.

An evaluation has 2 * num_prompts units: per prompt one of kind `sample` and one of kind `greedy`, always over the first
held-out prompts in upload order. Units are leased (leases.py) before any visit; an expired lease puts its unit back.
The first result of a unit counts. Unknown scores are left out of every mean, and counted (evaluation_summary.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from tba.api import BestVersion, EvalInfo, EvalReply, EvalRequest, EvalResult, EvalResults
from tba.errors import BadRequestError, ConflictError, ForbiddenError, NotFoundError
from tba.versions import PolicyVersion
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.prompts.evaluation_summary import (
    KINDS,
    EvalSummary,
    EvaluationUnit,
    StoredEval,
    find_best_version,
    summarise,
    summarise_first,
    with_raised,
)
from tba_buffer.run.lineage import Lineages, fenced
from tba_buffer.storage.context import Context, RunHash, needed
from tba_buffer.storage.redis_client import redis_errors


class Evaluations:
    """The evaluations of the run."""

    def __init__(self, context: Context, catalog: Catalog, lineages: Lineages) -> None:
        self._context = context
        self._catalog = catalog
        self._lineages = lineages

    async def request(self, request: EvalRequest) -> EvalReply:
        """Open an evaluation with the recipe's settings; a repeated request returns the evaluation that exists.

        An expired evaluation is opened again, and keeps the results that it has.

        Raises:
            FencedError: a newer lineage owns the run.
            ConflictError: there are no held-out prompts, no version was announced, or the requested one was not.
        """
        run, section, now = await RunHash.read(self._context), self._context.recipe.eval, self._context.clock()
        version, token = request.version or run.latest_version, request.token or run.token
        num_prompts = min(request.num_prompts or section.num_prompts, len(self._catalog.heldout))
        if not num_prompts:
            raise ConflictError("there are no held-out prompts to evaluate on; upload prompts with split 'heldout'")
        if version is None or token is None:
            raise ConflictError("no version was announced so far, so there is nothing to evaluate")
        document = StoredEval(
            # the id says what is asked for: the same request again finds the same evaluation
            eval_id=f"eval-{version}-{num_prompts}-{section.num_samples}",
            version=version,
            state="pending",
            num_prompts=num_prompts,
            num_samples=section.num_samples,
            success_reward=section.success_reward,
            pass_at=section.pass_at,
            created_at_s=now,
            deadline_s=now + section.timeout_s,
        )
        eval_id = document.eval_id
        units = [str(EvaluationUnit(eval_id, kind, number)) for number in range(num_prompts) for kind in KINDS]
        reply = await self._context.scripts.run(
            "eval_request",
            eval_id=eval_id,
            document=document.model_dump_json(),
            now_s=now,
            token=token,
            version=version,
            units=units,
        )
        if reply == b"fenced":
            raise fenced(f"the evaluation of version {version}")
        if reply == b"unknown-version":
            raise ConflictError(f"version {version} was never announced; announce it before its evaluation")
        self._context.leasable.notify()
        return EvalReply(**(await self.get(eval_id)).model_dump(), existed=reply == b"exists")

    async def get(self, eval_id: str) -> EvalInfo:
        """Return one evaluation.

        Raises:
            NotFoundError: there is none with this id.
        """
        found = await self._read([eval_id])
        if not found:
            raise NotFoundError(f"there is no evaluation {eval_id!r}")
        return found[0][0]

    async def all_and_best(self) -> tuple[list[EvalInfo], BestVersion | None]:
        """Return every evaluation, oldest first, and the best finished version that no resume has abandoned."""
        with redis_errors("read the evaluations"):
            ids = await self._context.redis.lrange(self._context.keys.eval_order, 0, -1)
        found = await self._read([eval_id.decode(errors="replace") for eval_id in ids])
        documents = [document for info, document in found if not info.abandoned]
        best = find_best_version(documents, self._context.recipe.eval, num_heldout=len(self._catalog.heldout))
        return [info for info, _ in found], best

    async def documents(self, eval_ids: Sequence[str]) -> dict[str, StoredEval]:
        """Return the stored evaluations by eval id; unknown ids are left out. `eval_ids` must not be empty."""
        with redis_errors("read the evaluations"):
            texts = await self._context.redis.hmget(self._context.keys.evals, list(eval_ids))
        return {
            eval_id: needed(self._context.keys.evals, eval_id, partial(StoredEval.model_validate_json, text))
            for eval_id, text in zip(eval_ids, texts, strict=True)
            if text is not None
        }

    async def results(self, eval_id: str, results: EvalResults) -> None:
        """Store results of leases, and finish the evaluation with the last one. A unit's first result counts.

        Results past the deadline are refused: the trainer may have deleted the version since, and a deleted version
        must not become the best one. A repeated report changes nothing.

        Raises:
            ConflictError: the evaluation has expired.
            NotFoundError: no such evaluation, or a lease that is not one of its leases.
            ForbiddenError: a lease was granted to another searcher.
            BadRequestError: the version is not the evaluation's, or counts in a result do not fit its lease.
        """
        document = (await self.documents([eval_id])).get(eval_id)
        if document is None:
            raise NotFoundError(f"there is no evaluation {eval_id!r}")
        if results.version != document.version:
            raise BadRequestError(f"{eval_id} evaluates version {document.version}, not {results.version}")
        # a repeated report: the results of a finished evaluation are no longer kept one by one
        if document.state == "done" or not results.results:
            return
        if self._is_expired(document):
            raise ConflictError(
                f"{eval_id} has expired, so its results are no longer accepted; the trainer may ask for it again"
            )
        keys = self._context.keys
        with redis_errors("read the leases"):
            units = await self._context.redis.hmget(keys.eval_units, [item.lease_id for item in results.results])
        stored: list[str] = []
        for item, value in zip(results.results, units, strict=True):
            # the value is "unit searcher"
            name, _, searcher_id = (value or b"").decode().partition(" ")
            unit = EvaluationUnit.parse(name) if name else None
            if unit is None or unit.eval_id != eval_id:
                raise NotFoundError(f"lease {item.lease_id!r} is not a lease of {eval_id}")
            if searcher_id != results.searcher_id:
                await self._context.count("foreign:eval_results")
                raise ForbiddenError(
                    f"lease {item.lease_id!r} was granted to another searcher, not to {results.searcher_id!r}; no "
                    "result was stored"
                )
            # before anything is stored: a report is taken as a whole or not at all
            wanted = document.num_samples if unit.kind == "sample" else 1
            if len(item.rewards) != wanted or len(item.num_response_tokens) != wanted:
                raise BadRequestError(
                    f"lease {item.lease_id!r} ({unit.kind}) asked for {wanted} completions, got {len(item.rewards)} "
                    f"rewards and {len(item.num_response_tokens)} lengths"
                )
            num_wrong, num_unknown = (item.num_wrong or 0) + (item.num_raised or 0), item.rewards.count(None)
            if num_wrong > num_unknown:
                raise BadRequestError(
                    f"lease {item.lease_id!r}: num_wrong and num_raised are {num_wrong} of {num_unknown} unknown"
                )
            stored += [item.lease_id, item.model_dump_json(exclude={"lease_id"}, exclude_none=True)]
        num_done = await self._context.scripts.run("eval_results", eval_id=eval_id, results=stored)
        if num_done >= len(KINDS) * document.num_prompts:
            await self._finish(document)

    async def _read(self, eval_ids: Sequence[str]) -> list[tuple[EvalInfo, StoredEval]]:
        """Return evaluations with their documents; unknown ones are left out."""
        if not eval_ids:
            return []
        keys, found = self._context.keys, []
        documents = await self.documents(eval_ids)
        with redis_errors("read the evaluations"):
            counts = await self._context.redis.hmget(keys.eval_done, list(eval_ids))
        for eval_id, count in zip(eval_ids, counts, strict=True):
            if (document := documents.get(eval_id)) is None:
                continue
            num_done = needed(keys.eval_done, eval_id, lambda count=count: int(count or 0))
            if document.state == "pending" and num_done >= len(KINDS) * document.num_prompts:
                document = await self._finish(document)  # the process died after it stored the last result
            info = EvalInfo(
                eval_id=document.eval_id,
                version=document.version,
                state="expired" if self._is_expired(document) else document.state,
                num_prompts=document.num_prompts,
                num_done=document.num_prompts if document.state == "done" else num_done // len(KINDS),
                num_samples=document.num_samples,
                created_at_s=document.created_at_s,
                abandoned=self._lineages.has_abandoned(PolicyVersion.parse(document.version)),
                **({} if document.summary is None else document.summary.model_dump()),
            )
            found.append((info, document))
        return found

    def _is_expired(self, document: StoredEval) -> bool:
        return document.state == "pending" and document.deadline_s <= self._context.clock()

    async def _finish(self, document: StoredEval) -> StoredEval:
        eval_id, keys, redis = document.eval_id, self._context.keys, self._context.redis
        units = [EvaluationUnit(eval_id, kind, number) for number in range(document.num_prompts) for kind in KINDS]
        with redis_errors("finish an evaluation"):
            texts = await redis.hmget(keys.eval_results, [str(unit) for unit in units])
            leases = await redis.hgetall(keys.eval_units)
            if any(text is None for text in texts):  # another request has just finished it
                return (await self.documents([eval_id])).get(eval_id, document)
            results = {
                unit: needed(
                    keys.eval_results,
                    str(unit),
                    lambda text=text: EvalResult.model_validate({**json.loads(text), "lease_id": "ended"}),
                )
                for unit, text in zip(units, texts, strict=True)
            }
            tasks = {number: prompt.task for number, prompt in enumerate(self._catalog.heldout)}
            results = with_raised(results, tasks)
            # versions are compared over the prompts that every evaluation has
            num_first = min(document.num_prompts, self._context.recipe.eval.num_prompts_compared)
            success_reward, pass_at = document.success_reward, document.pass_at
            numbers = summarise(results, success_reward=success_reward, pass_at=pass_at)
            done = document.model_copy(
                update={
                    "state": "done",
                    "summary": EvalSummary(**numbers.model_dump(), finished_at_s=self._context.clock()),
                    "first": summarise_first(results, num_first, success_reward=success_reward, pass_at=pass_at),
                }
            )
            # a repeated report is answered by the state `done` from now on, so its leases need not be known
            ended = [lease for lease, value in leases.items() if value.startswith(f"{eval_id}|".encode())]
            # one transaction: after a kill either the results are there, or the finished evaluation is
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hset(keys.evals, eval_id, done.model_dump_json())
                pipe.hdel(keys.eval_results, *(str(unit) for unit in units))
                pipe.hdel(keys.eval_done, eval_id)
                if ended:
                    pipe.hdel(keys.eval_units, *ended)
                await pipe.execute()
        self._context.changed.notify()
        return done
