"""Evaluations on held-out prompts, done by searchers with a pinned version.

An evaluation has 2 * num_prompts units: per prompt one of kind `sample` and one of kind `greedy`, always over the first
held-out prompts in upload order. Units are leased (leases.py) before any visit; an expired lease puts its unit back.
The first result of a unit counts. Unknown scores are left out of every mean, and counted (evaluation_summary.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from tba.api import (
    BestVersion,
    EvalInfo,
    EvalNumbers,
    EvalRequest,
    EvalResult,
    EvalResults,
    EvaluateReply,
    EvaluateRequest,
)
from tba.errors import BadRequestError, ConflictError, ForbiddenError, NotFoundError
from tba.fields import Integer, Number
from tba.versions import PolicyVersion
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.prompts.evaluation_summary import (
    KINDS,
    EvaluationUnit,
    Results,
    count_unknown,
    find_best_version,
    summarise,
    summarise_first,
    with_raised,
)
from tba_buffer.run.lineage import Lineages, fenced
from tba_buffer.storage.context import Context, RunHash, needed
from tba_buffer.storage.redis_client import redis_errors


class Evaluations:
    """The evaluations of the run.

    Args:
        context: Redis and settings.
        catalog: holds the held-out prompts.
        lineages: say which versions the run has abandoned.
    """

    def __init__(self, context: Context, catalog: Catalog, lineages: Lineages) -> None:
        self._context = context
        self._catalog = catalog
        self._lineages = lineages

    async def request(self, request: EvalRequest) -> EvalInfo:
        """Open an evaluation. The same version, prompts and samples again return the same one.

        An expired evaluation is opened again, and keeps the results that it has.

        Raises:
            FencedError: a newer lineage owns the run.
            ConflictError: there are no held-out prompts, or the version was never announced.
        """
        eval_id, _ = await self._open(request)
        return await self.get(eval_id)

    async def _open(self, request: EvalRequest) -> tuple[str, bool]:
        """Return the id of the evaluation, and whether it existed."""
        num_prompts = min(request.num_prompts, len(self._catalog.heldout))
        if not num_prompts:
            raise ConflictError("there are no held-out prompts to evaluate on; upload prompts with split 'heldout'")
        # the id says what is asked for: the same request again finds the same evaluation
        eval_id, now = f"eval-{request.version}-{num_prompts}-{request.num_samples}", self._context.clock()
        document = {
            "eval_id": eval_id,
            "version": request.version,
            "state": "pending",
            "num_prompts": num_prompts,
            "num_samples": request.num_samples,
            "success_reward": request.success_reward,
            "pass_at": request.pass_at,
            "created_at_s": now,
            "deadline_s": now + request.timeout_s,
        }
        units = [str(EvaluationUnit(eval_id, kind, number)) for number in range(num_prompts) for kind in KINDS]
        reply = await self._context.scripts.run(
            "eval_request",
            eval_id=eval_id,
            document=json.dumps(document),
            now_s=now,
            token=request.token,
            version=request.version,
            units=units,
        )
        if reply == b"fenced":
            raise fenced(f"the evaluation of version {request.version}")
        if reply == b"unknown-version":
            raise ConflictError(
                f"version {request.version} was never announced, so there is nothing to evaluate; announce it first"
            )
        self._context.leasable.notify()
        return eval_id, reply == b"exists"

    async def request_for_operator(self, request: EvaluateRequest) -> EvaluateReply:
        """Open an evaluation with the recipe's settings, in the name of the lineage that is active.

        Raises:
            ConflictError: there are no held-out prompts, no version yet, or no such version.
        """
        run, section = await RunHash.read(self._context), self._context.recipe.eval
        version = request.version or run.latest_version
        if version is None or run.token is None:
            raise ConflictError(
                "no version was announced so far, so there is nothing to evaluate; wait for the trainer"
            )
        # fenced only if a trainer starts at this very moment: then the same request again is right
        eval_id, existed = await self._open(
            EvalRequest(
                version=version,
                token=run.token,
                num_prompts=request.num_prompts or section.num_prompts,
                num_samples=section.num_samples,
                pass_at=section.pass_at,
                success_reward=section.success_reward,
                timeout_s=section.timeout_s,
            )
        )
        return EvaluateReply(**(await self.get(eval_id)).model_dump(), existed=existed)

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
        """Return every evaluation, oldest first, and the best version of the finished ones that are not abandoned."""
        with redis_errors("read the evaluations"):
            ids = await self._context.redis.lrange(self._context.keys.eval_order, 0, -1)
        found = await self._read([eval_id.decode(errors="replace") for eval_id in ids])
        documents = (document for info, document in found if document is not None and not info.abandoned)
        best = find_best_version(documents, self._context.recipe.eval, num_heldout=len(self._catalog.heldout))
        return [info for info, _ in found], best

    async def documents(self, eval_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the stored documents of evaluations, at least one, without the damaged ones."""
        with redis_errors("read the evaluations"):
            texts = await self._context.redis.hmget(self._context.keys.evals, list(eval_ids))
        found = {}
        for eval_id, text in zip(eval_ids, texts, strict=True):
            document = None if text is None else self._document(eval_id, text)
            if document is not None:
                found[eval_id] = document
        return found

    async def results(self, eval_id: str, results: EvalResults) -> None:
        """Store results; idempotent by lease, and the first result of a unit counts.

        Nothing is taken past the deadline: from then on the version is not held. It may be gone, and a version that is
        gone must not become the best one.

        Raises:
            ConflictError: the evaluation has expired.
            NotFoundError: no such evaluation, or a lease that is not one of its leases.
            ForbiddenError: a lease was granted to another searcher.
            BadRequestError: the version is another one, or a number is not what was leased or can be.
        """
        document = (await self.documents([eval_id])).get(eval_id)
        if document is None:
            raise NotFoundError(f"there is no evaluation {eval_id!r}")
        if results.version != document["version"]:
            raise BadRequestError(f"{eval_id} evaluates version {document['version']}, not {results.version}")
        # a repeated report: the results of a finished evaluation are no longer kept one by one
        if document["state"] == "done" or not results.results:
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
            unit, searcher_id = _unit_of(value)
            if unit is None or unit.eval_id != eval_id:
                raise NotFoundError(f"lease {item.lease_id!r} is not a lease of {eval_id}")
            if searcher_id != results.searcher_id:
                await self._context.count("foreign:eval_results")
                raise ForbiddenError(
                    f"lease {item.lease_id!r} was granted to another searcher, not to {results.searcher_id!r}; no "
                    "result was stored"
                )
            # before anything is stored: a report is taken as a whole or not at all
            _check_result(item, unit, document["num_samples"])
            stored += [item.lease_id, item.model_dump_json(exclude={"lease_id"}, exclude_none=True)]
        num_done = await self._context.scripts.run("eval_results", eval_id=eval_id, results=stored)
        if num_done >= len(KINDS) * document["num_prompts"]:
            await self._finish(document)

    async def _read(self, eval_ids: Sequence[str]) -> list[tuple[EvalInfo, dict[str, Any]]]:
        """Return evaluations with their documents; unknown ones are left out."""
        if not eval_ids:
            return []
        keys, found = self._context.keys, []
        with redis_errors("read the evaluations"):
            texts = await self._context.redis.hmget(keys.evals, list(eval_ids))
            counts = await self._context.redis.hmget(keys.eval_done, list(eval_ids))
        for eval_id, text, count in zip(eval_ids, texts, counts, strict=True):
            if text is None:
                continue
            document = self._document(eval_id, text)
            num_units = len(KINDS) * document["num_prompts"]
            num_done = needed(keys.eval_done, eval_id, lambda count=count: int(count or 0))
            if document["state"] == "pending" and num_done >= num_units:
                document = await self._finish(document)  # the process died after it stored the last result
            found.append((self._info(document, num_done), document))
        return found

    def _document(self, eval_id: str, text: bytes) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            document = json.loads(text)
            # both readers are tried now: a damaged field must not show in the middle of an answer
            self._info(document, 0)
            StoredEval.model_validate(document)
            return document

        return needed(self._context.keys.evals, eval_id, read)

    def _info(self, document: dict[str, Any], num_done: int) -> EvalInfo:
        state = "expired" if self._is_expired(document) else document["state"]
        return EvalInfo(
            eval_id=document["eval_id"],
            version=document["version"],
            state=state,
            num_prompts=document["num_prompts"],
            num_done=document["num_prompts"] if state == "done" else num_done // len(KINDS),
            num_samples=document["num_samples"],
            created_at_s=document["created_at_s"],
            abandoned=self._lineages.has_abandoned(PolicyVersion.parse(document["version"])),
            **document.get("summary", {}),
        )

    def _is_expired(self, document: dict[str, Any]) -> bool:
        return document["state"] == "pending" and document["deadline_s"] <= self._context.clock()

    async def _finish(self, document: dict[str, Any]) -> dict[str, Any]:
        eval_id, keys, redis = document["eval_id"], self._context.keys, self._context.redis
        units = [EvaluationUnit(eval_id, kind, number) for number in range(document["num_prompts"]) for kind in KINDS]
        with redis_errors("finish an evaluation"):
            texts = await redis.hmget(keys.eval_results, [str(unit) for unit in units])
            leases = await redis.hgetall(keys.eval_units)
            if any(text is None for text in texts):  # another request has just finished it
                return (await self.documents([eval_id])).get(eval_id, document)
            results = {unit: self._result(unit, text) for unit, text in zip(units, texts, strict=True)}
            done = self._done(document, results)
            # a repeated report is answered by the state `done` from now on, so its leases need not be known
            ended = [lease for lease, value in leases.items() if _is_of(value, eval_id)]
            # one transaction: after a kill either the results are there, or the finished evaluation is
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hset(keys.evals, eval_id, json.dumps(done))
                pipe.hdel(keys.eval_results, *(str(unit) for unit in units))
                pipe.hdel(keys.eval_done, eval_id)
                if ended:
                    pipe.hdel(keys.eval_units, *ended)
                await pipe.execute()
        self._context.changed.notify()
        return done

    def _result(self, unit: EvaluationUnit, text: bytes) -> dict[str, Any]:
        """Return the stored result of a unit."""

        def read() -> dict[str, Any]:
            return EvalResult.model_validate({**json.loads(text), "lease_id": "ended"}).model_dump()

        return needed(self._context.keys.eval_results, str(unit), read)

    def _done(self, document: dict[str, Any], results: Results) -> dict[str, Any]:
        """Return the document of a finished evaluation: its numbers, and those that versions are compared by."""
        results = with_raised(results, {number: prompt.task for number, prompt in enumerate(self._catalog.heldout)})
        how = {"success_reward": document["success_reward"], "pass_at": document.get("pass_at", ())}
        # versions are compared over the prompts that every evaluation has
        num_first = min(document["num_prompts"], self._context.recipe.eval.num_prompts_compared)
        numbers, first = summarise(results, **how), summarise_first(results, num_first, **how)
        return {
            **document,
            "state": "done",
            "summary": {**numbers.model_dump(mode="json"), "finished_at_s": self._context.clock()},
            "first": {
                "num_prompts": num_first,
                "numbers": first.model_dump(mode="json"),
                "num_unknown": count_unknown(results, num_first),
            },
        }


class ComparedNumbers(BaseModel):
    """The numbers over the prompts that all evaluations have."""

    num_prompts: Integer
    numbers: EvalNumbers
    num_unknown: dict[str, int] = Field(default_factory=dict)


class FinishedAt(BaseModel):
    """When it was finished."""

    finished_at_s: Number


class StoredEval(BaseModel):
    """The fields of a stored evaluation beside its EvalInfo; `first` and `summary` come when it is done."""

    success_reward: Number
    deadline_s: Number
    num_samples: Annotated[Integer, Field(ge=1, le=4096)]
    pass_at: list[Integer] = Field(default_factory=list)
    first: ComparedNumbers | None = None
    summary: FinishedAt | None = None


def _unit_of(value: bytes | None) -> tuple[EvaluationUnit | None, str]:
    """Return the unit of a lease, and the searcher that it was granted to."""
    unit, _, searcher_id = (value or b"").decode().partition(" ")
    return EvaluationUnit.parse(unit) if unit else None, searcher_id


def _is_of(value: bytes, eval_id: str) -> bool:
    unit, _ = _unit_of(value)
    return unit is not None and unit.eval_id == eval_id


def _check_result(item: EvalResult, unit: EvaluationUnit, num_samples: int) -> None:
    wanted = num_samples if unit.kind == "sample" else 1
    if len(item.rewards) != wanted or len(item.num_response_tokens) != wanted:
        raise BadRequestError(
            f"lease {item.lease_id!r} ({unit.kind}) asked for {wanted} completions, got {len(item.rewards)} rewards "
            f"and {len(item.num_response_tokens)} lengths"
        )
    if (num_wrong := (item.num_wrong or 0) + (item.num_raised or 0)) > (num_unknown := item.rewards.count(None)):
        raise BadRequestError(
            f"lease {item.lease_id!r}: num_wrong and num_raised are {num_wrong} of {num_unknown} unknown"
        )
