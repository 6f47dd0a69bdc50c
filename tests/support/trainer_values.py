"""Recipes, rollouts and batches for tests of the trainer, and a fake buffer that hands out recorded batches."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tba.api import (
    AckRequest,
    BatchRequest,
    BestVersion,
    CheckpointRequest,
    ComponentInfo,
    EvalInfo,
    EvalRequest,
    LineageReply,
    LineageRequest,
    OriginInfo,
    RollbackInfo,
    RunCommand,
    RunInfo,
    SettingsInfo,
    SettingsRequest,
    VersionReply,
    VersionRequest,
)
from tba.config import LiveSettings, Recipe, parse_recipe
from tba.errors import ConflictError, FencedError, RollbackError, RunFailedError, RunOverError
from tba.versions import START, PolicyVersion
from tba.wire import Batch, Group, Heartbeat, RefLogprob, Rollout, Sampling, VersionSpan, float32_bytes, single_turn
from tests.support.rollout_values import replace

VOCAB_SIZE = 33


def make_recipe(path: Path | str, /, **sections: dict[str, Any]) -> Recipe:
    """Return a recipe for the model at `path`; `sections` override keys."""
    document: dict[str, Any] = {
        "run": {"name": "demo", "seed": 3},
        "model": {"path": str(path)},
        "data": {"generator": "addition"},
        "objective": {"preset": "tb"},
        # the log-probs of `make_rollout` are no model's
        "searcher": {"engine": "simulated"},
        "trainer": {"num_steps": 4, "batch_wait_s": 60.0, "micro_batch_tokens": 4096},
        "eval": {"every_steps": 2, "timeout_s": 5.0},
        "tracking": {"metrics_path": str(Path(path).parent / "metrics.jsonl")},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return parse_recipe(document, where="test")


def recipe_of_buffer(recipe: Recipe, model: Path, **trainer: Any) -> Recipe:
    """Return the recipe of a trainer for a real buffer that was started with `recipe`; it waits for no evaluation."""
    document: dict[str, Any] = recipe.model_dump()
    document["searcher"]["engine"] = "simulated"  # the log-probs of `make_rollout` are no model's
    document["model"]["path"] = str(model)
    document["eval"] |= {"every_steps": 1000, "num_prompts": 4, "num_prompts_final": 4, "timeout_s": 0.5}
    document["trainer"] |= {"batch_wait_s": 120.0, **trainer}
    return Recipe.model_validate(document)


def make_rollout(
    rng: np.random.Generator,
    *,
    prompt_id: str = "p-0",
    run: str = "demo",
    num_prompt_tokens: int = 5,
    num_response_tokens: int = 7,
    version: PolicyVersion = START,
    temperature: float = 1.0,
    reward: float | None = 1.0,
    sampler_logprobs: np.ndarray | None = None,
    ref_logprob: RefLogprob | None = None,
    response_tokens: np.ndarray | None = None,
) -> Rollout:
    """Return a rollout with random prompt tokens and, by default, random response tokens and log-probs."""
    tokens = rng.integers(3, VOCAB_SIZE, num_response_tokens) if response_tokens is None else response_tokens
    logprobs = -rng.random(len(tokens)) * 3 if sampler_logprobs is None else sampler_logprobs
    return Rollout(
        rollout_id=rng.bytes(16),
        run=run,
        task="addition",
        prompt_id=prompt_id,
        visit_id="visit-1",
        sequences=single_turn(rng.integers(3, VOCAB_SIZE, num_prompt_tokens), tokens, "stop"),
        response_text="",
        version_spans=(VersionSpan.of(version, 0, len(tokens)),),
        sampling=Sampling.of(temperature),
        logprob_bytes=float32_bytes(logprobs),
        ref_logprob=ref_logprob,
        reward=reward,
        reward_status="pending" if reward is None else "scored",
        reward_reason=None,
        reward_version=None if reward is None else "addition-1",
        searcher_id="searcher-0",
        started_at_s=1.0,
        finished_at_s=2.0,
    )


def make_batch(seed: int, *, num_groups: int = 3, group_size: int = 4, batch_id: str | None = None) -> Batch:
    """Return a batch of random rollouts with mixed lengths and rewards; the same seed gives the same batch."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        rollouts = [
            make_rollout(
                rng,
                prompt_id=f"p-{seed}-{g}",
                num_prompt_tokens=int(3 + g),
                num_response_tokens=int(rng.integers(2, 12)),
                reward=float(rng.integers(0, 2)),
            )
            for _ in range(group_size)
        ]
        groups.append(Group(prompt_id=f"p-{seed}-{g}", source="recent", fallback=False, rollouts=tuple(rollouts)))
    return Batch(
        batch_id=batch_id or f"batch-{seed}",
        deadline_s=time.time() + 600,
        seed=seed,
        log_position=0,
        groups=tuple(groups),
    )


def make_repeating_batch(step: int) -> Batch:
    """The batch of a step, which has rollouts of earlier ones, so that the reference's cache matters."""
    first, second = make_batch(step % 3), make_batch(10 + step)
    return replace(second, groups=(*second.groups[:2], first.groups[step % 2]))


def changed(batch: Batch, change: Callable[[int, Rollout], Rollout]) -> Batch:
    """Return a copy of the batch in which each rollout is replaced by `change(row, rollout)`."""
    rows = itertools.count()
    groups = [replace(group, rollouts=tuple(change(next(rows), r) for r in group.rollouts)) for group in batch.groups]
    return replace(batch, groups=tuple(groups))


class RecordedBuffer:
    """The methods of BufferClient over recorded batches, one per step; only the newest lineage's token is accepted.

    Every method first calls `before` with its name; a test may make that raise.
    """

    def __init__(self, batch_of: Callable[[int], Batch] = make_batch) -> None:
        self.batch_of = batch_of
        self.before: Callable[[str], None] = lambda method: None
        self.state: Any = "running"
        self.reason: str | None = None
        self.lineage, self.step = 0, 0
        self.num_lost_changes = 0
        self.parents: dict[int, str] = {}
        self.num_rollbacks = 0
        self.rollback: RollbackInfo | None = None
        self.marks: list[str] = []
        self.acks: list[tuple[int, int, AckRequest]] = []
        self.drawn: list[tuple[int, int]] = []
        self.checkpoint: tuple[str, str] | None = None
        self.kept: list[str] = []
        self.evals: dict[str, EvalRequest] = {}
        self.eval_state: Any = "done"
        self.beats: list[Heartbeat] = []
        self.components: list[ComponentInfo] = []
        self.origin: OriginInfo | None = None
        self.best: BestVersion | None = None
        self.settings_revision = 0
        self.changes: list[SettingsRequest] = []
        self._live = LiveSettings()
        self._lock = threading.RLock()

    def _enter(self, method: str, token: str | None = None) -> None:
        self.before(method)
        if token is not None and token != f"token-{self.lineage}":
            raise FencedError(f"{token} is not the token of the newest lineage {self.lineage}")

    def run(self) -> RunInfo:
        self._enter("run")
        return RunInfo(
            run="demo",
            state=self.state,
            state_reason=self.reason,
            step=self.step,
            lineage=self.lineage,
            num_lost_changes=self.num_lost_changes,
            parents=dict(self.parents),
            latest_version=self.marks[-1] if self.marks else None,
            checkpoint=self.checkpoint and self.checkpoint[0],
            checkpoint_key=self.checkpoint and self.checkpoint[1],
            num_rollbacks=self.num_rollbacks,
            rollback=self.rollback,
            components=self.components,
            waits=[],
            evals=[self._info(eval_id) for eval_id in list(self.evals)],  # asked in several threads
            best=self.best,
            origin=self.origin,
        )

    def new_lineage(self, request: LineageRequest) -> LineageReply:
        self._enter("new_lineage")
        with self._lock:
            waiting, parent = self.rollback, PolicyVersion.parse(request.parent)
            obeys = waiting is not None and waiting.request_id == request.obeys
            if request.obeys is not None and not obeys:
                raise ConflictError("the rollback that it obeys does not wait any more")
            self.lineage += 1
            self.parents[self.lineage], self.step = request.parent, parent.step
            self.num_rollbacks += request.rollback
            if self.checkpoint is not None and PolicyVersion.parse(self.checkpoint[0]).step > parent.step:
                key = request.checkpoint_key
                self.checkpoint = None if key is None else (request.parent, key)
            if waiting is not None and (obeys or parent.step <= PolicyVersion.parse(waiting.version).step):
                self.rollback = None
            if request.fails is not None:
                self.state, self.reason = "failed", request.fails
            elif self.state != "paused" and not (self.state in ("stopping", "failed") and request.in_process):
                self.state, self.reason = "running", None
            return LineageReply(lineage=self.lineage, token=f"token-{self.lineage}")

    def announce_version(self, request: VersionRequest) -> VersionReply:
        self._enter("announce_version", request.token)
        self.marks.append(request.version)
        return VersionReply(log_position=len(self.marks))

    def ask_for_rollback(self, version: str) -> None:
        self.rollback = RollbackInfo(
            version=version,
            step=PolicyVersion.parse(version).step,
            reason="look",
            at_s=0.0,
            request_id=f"request-{len(self.acks)}",
        )

    def _refuse_for_rollback(self) -> None:
        if self.rollback is not None:
            raise RollbackError(f"an operator has asked for a rollback to {self.rollback.version}")

    def register_checkpoint(self, request: CheckpointRequest) -> None:
        self._enter("register_checkpoint", request.token)
        self._refuse_for_rollback()
        self.checkpoint = (request.version, request.key)
        self.kept = self.kept if request.kept is None else request.kept

    def draw_batch(self, request: BatchRequest) -> Batch:
        self._enter("draw_batch", request.token)
        self._refuse_for_rollback()
        if self.state == "failed":
            raise RunFailedError("the run has failed")
        if self.state != "running":
            raise RunOverError(f"the run is {self.state}")
        self.drawn.append((request.lineage, request.step))
        return self.batch_of(request.step)

    def ack(self, batch_id: str, request: AckRequest) -> None:
        self._enter("ack", request.token)
        self._refuse_for_rollback()
        self.acks.append((request.lineage, request.step, request))
        self.step = request.step

    def request_eval(self, request: EvalRequest) -> EvalInfo:
        self._enter("request_eval", request.token)
        eval_id = f"eval-{request.version}"
        self.evals.setdefault(eval_id, request)
        return self._info(eval_id)

    def get_eval(self, eval_id: str) -> EvalInfo:
        self._enter("get_eval")
        return self._info(eval_id)

    def heartbeat(self, beat: Heartbeat) -> None:
        self._enter("heartbeat")
        self.beats.append(beat)

    def command(self, name: str, command: RunCommand) -> RunInfo:
        self._enter(f"command:{name}", command.token)
        if name == "done":
            self._refuse_for_rollback()
        elif name in ("stop", "fail"):
            self.rollback = None
        self.state = {"done": "done", "fail": "failed", "stop": "stopping", "pause": "paused", "resume": "running"}[
            name
        ]
        self.reason = command.reason
        return self.run()

    def all_settings(self) -> SettingsInfo:
        """Return the settings with all changes, which fit on one page here."""
        return self.settings()

    def settings(self, *, after: int = 0) -> SettingsInfo:
        self._enter("settings")
        return SettingsInfo(
            revision=self.settings_revision, settings=self._live, recipe=LiveSettings(), now={}, changes=[], next=None
        )

    def change_settings(self, request: SettingsRequest) -> SettingsInfo:
        self._enter("change_settings", request.token)
        if any(change.request_id == request.request_id for change in self.changes):
            return self.settings()
        if request.revision not in (None, self.settings_revision):
            raise ConflictError(f"the settings are at revision {self.settings_revision}")
        self.changes.append(request)
        given = {name: getattr(request.settings, name) for name in request.settings.model_fields_set}
        self._live = self._live.model_copy(update=given)
        self.settings_revision += 1
        return self.settings()

    def _info(self, eval_id: str) -> EvalInfo:
        request = self.evals[eval_id]
        return EvalInfo(
            eval_id=eval_id,
            version=str(request.version),
            state=self.eval_state,
            num_prompts=request.num_prompts or 0,
            num_done=request.num_prompts or 0,
            accuracy=0.5,
            created_at_s=1.0,
        )
