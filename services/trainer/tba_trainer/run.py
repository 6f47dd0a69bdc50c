"""Builds a trainer from a recipe and runs it. The only module that knows every other."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from tba.api import BatchRequest
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import TeamError
from tba.logs import get_logger
from tba.starting import EXIT_STOPPED, start_is_over
from tba.store import ObjectStore, open_store
from tba.tokens import client_token
from tba.versions import START
from tba.weights import WeightVersions, sha256_of_file
from tba.wire import Batch
from tba_trainer.building import build
from tba_trainer.checkpoint import Checkpoints
from tba_trainer.collect import Collector, delete_incomplete
from tba_trainer.ending import End
from tba_trainer.evaluations import Evaluations
from tba_trainer.guards import Rollback
from tba_trainer.loop import TrainingLoop
from tba_trainer.model import side_files
from tba_trainer.parallel.follower import follow
from tba_trainer.parallel.team import Team
from tba_trainer.prefetch import Prefetcher
from tba_trainer.publisher import Publisher
from tba_trainer.scratch import scratch_folder
from tba_trainer.screening import Needs
from tba_trainer.signals import stop_on_signals
from tba_trainer.snapshots import Snapshot, Snapshots
from tba_trainer.startup import Session, begin, check_starting_model, starting_snapshot, wait_for_origin
from tba_trainer.status import Heartbeats, Status
from tba_trainer.tracking import Tracking, open_tracking
from tba_trainer.values import Values

_TOLD_WITHIN_S = 1.0
"""torchrun signals its processes one after another; who is told last may have lost the first one by then."""
log = get_logger("run")


def run_trainer(recipe: Recipe) -> int:
    """Run one trainer until the run is over or SIGTERM arrives; or one of its processes, where torchrun started it.

    Returns:
        The exit code: 0 when the run is over, 143 when it was told to stop before. With several processes of one
        machine, that of the leader is the one that counts; on several machines everyone's is, since each has a Job's
        pod of its own.

    Raises:
        TbaError: one clear sentence.
    """
    torch.set_num_threads(recipe.trainer.torch_num_threads)
    with Team.join(device=recipe.trainer.device, deadline_s=recipe.trainer.collective_timeout_s) as team:
        if team.is_leader:
            _lead(recipe, team)
        else:
            _follow(recipe, team)
    counts = team.is_leader or not team.is_on_one_machine
    return EXIT_STOPPED if counts and not team.run_is_over else 0


def _lead(recipe: Recipe, team: Team) -> None:
    token = client_token(recipe.auth.tokens_file, "trainer")
    buffer = BufferClient(recipe.buffer_url, token=token, retry_s=recipe.trainer.retry_s, ca_file=recipe.tls.ca_file)
    stop = threading.Event()
    team.start_beats(on_loss=stop.set)
    try:
        end = train(recipe, buffer=buffer, store=open_store(recipe.store), stop=stop, team=team)
        team.run_is_over = end == "done"
    finally:
        buffer.close()


def _follow(recipe: Recipe, team: Team) -> None:
    """Signals end nothing here: the leader is told too, and says when it is over. One that still starts is gone at once
    without a word; who was told as well knows why."""
    told = threading.Event()
    with stop_on_signals(told):
        try:
            follow(recipe, team)
        except TeamError:
            if not told.wait(_TOLD_WITHIN_S):
                raise
            log.info("leader_is_gone", rank=team.rank)


def train(
    recipe: Recipe, *, buffer: BufferClient, store: ObjectStore, stop: threading.Event, team: Team | None = None
) -> End:
    """The same, with the outside world given; in the leader of a team.

    Args:
        team: the processes that train together; None: this one alone.
        stop: set when the process should finish its step, write a checkpoint and return. While training goes on,
            signals set it; before, and while a rollback starts anew, nothing is there to be kept, and they end the
            process at once (tba/starting.py).

    Returns:
        Whether the run is done, or training was stopped before.
    """
    trainer_id = f"trainer-{socket.gethostname()}-{os.getpid()}"
    status = Status(trainer_id=trainer_id, run=recipe.run.name)
    end: Rollback | End | None = None
    tracking = open_tracking(recipe, buffer)
    try:
        while True:
            with scratch_folder() as folder:
                end = _train_lineage(
                    recipe,
                    team or Team.alone(recipe.trainer.device),
                    buffer=buffer,
                    store=store,
                    status=status,
                    tracking=tracking,
                    folder=folder,
                    stop=stop,
                    rollback=end if isinstance(end, Rollback) else None,
                )
            if not isinstance(end, Rollback):
                return end
            if stop.is_set():
                return "stopped"
            gc.collect()  # the old model must go before the next one is built: on a GPU both may not fit
    finally:
        tracking.close()


def _train_lineage(
    recipe: Recipe,
    team: Team,
    *,
    buffer: BufferClient,
    store: ObjectStore,
    status: Status,
    tracking: Tracking,
    folder: Path,
    stop: threading.Event,
    rollback: Rollback | None,
) -> Rollback | End:
    """One lineage, from the starting model and the last checkpoint on. A rollback ends it; the next one then starts
    exactly as a restarted process does.

    Args:
        folder: for large files of this lineage.
        rollback: how the lineage before this one ended; None: this is the first one of the process.

    Returns:
        The rollback that ended it; else whether the run is done or training was stopped.
    """
    store.check(write=True)
    model, learner, snapshots = build(recipe, team, folder=folder)
    files = side_files(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    model_config_sha256 = sha256_of_file(files["config.json"])
    versions = WeightVersions(store, recipe.run.name)
    checkpoints = Checkpoints(store, recipe.run.name, folder=folder, max_bytes=recipe.store.shard_bytes)
    start = starting_snapshot(snapshots)
    origin = wait_for_origin(buffer, wait_s=recipe.trainer.batch_wait_s, stop=stop)
    if stop.is_set():
        return "stopped"
    check_starting_model(start, versions, origin)
    session = begin(
        recipe,
        trainer_id=status.trainer_id,
        buffer=buffer,
        store=store,
        checkpoints=checkpoints,
        learner=learner,
        model_config_sha256=model_config_sha256,
        rollback=rollback,
    )
    tracking.start(session.lineage, session.parent)
    delete_incomplete(versions, checkpoints, before_lineage=session.lineage, registered=session.parent)
    evaluations, publisher = _publishing(recipe, session, buffer, versions, checkpoints, status, files, stop)
    prefetcher = _prefetcher(recipe, session, buffer, status, stop)
    loop = TrainingLoop(
        recipe,
        session,
        buffer=buffer,
        store=store,
        checkpoints=checkpoints,
        learner=learner,
        needs=Needs.of(recipe, model),
        values=Values(recipe, buffer),
        snapshots=snapshots,
        publisher=publisher,
        prefetcher=prefetcher,
        evaluations=evaluations,
        status=status,
        tracking=tracking,
        model_config_sha256=model_config_sha256,
        stop=stop,
    )
    heartbeats = Heartbeats(buffer, status, lambda: _gauges(loop, publisher, prefetcher, tracking))
    stores_start = recipe.searchers_hold_start and not versions.exists(START)
    heartbeats.start()
    publisher.start()
    try:
        status.set_state("publishing")
        _publish_first(session, start, publisher, snapshots, evaluations, stores_start=stores_start)
        return _run(loop, prefetcher, stop)
    finally:
        _close(prefetcher, publisher, heartbeats)


def _run(loop: TrainingLoop, prefetcher: Prefetcher, stop: threading.Event) -> Rollback | End:
    """The part that a signal stops in order. After a rollback a signal ends the process at once again; after any other
    end it changes nothing: the exit code is that of what has been done."""
    end = None
    with stop_on_signals(stop):
        try:
            prefetcher.start()
            end = loop.run()
            return end
        finally:
            if not isinstance(end, Rollback):
                start_is_over()


def _close(*threads: Prefetcher | Publisher | Heartbeats) -> None:
    for thread in threads:
        thread.close()


def _publishing(
    recipe: Recipe,
    session: Session,
    buffer: BufferClient,
    versions: WeightVersions,
    checkpoints: Checkpoints,
    status: Status,
    files: Mapping[str, Path],
    stop: threading.Event,
) -> tuple[Evaluations, Publisher]:
    """What publishes the versions of this lineage, and what asks for their evaluations."""
    evaluations = Evaluations(
        buffer,
        recipe.eval,
        token=session.token,
        start_step=session.parent.step,
        sync_interval=recipe.trainer.sync_interval,
        enabled=not recipe.is_offline,
    )
    collector = Collector(buffer, versions, checkpoints, keep_versions=recipe.trainer.keep_versions)
    publisher = Publisher(
        versions=versions,
        buffer=buffer,
        evaluations=evaluations,
        status=status,
        files=files,
        token=session.token,
        collect=collector.collect,
        max_unpublished=recipe.trainer.max_unpublished_versions,
        wait_s=recipe.trainer.retry_s,
        stop=stop,
    )
    return evaluations, publisher


def _gauges(loop: TrainingLoop, publisher: Publisher, prefetcher: Prefetcher, tracking: Tracking) -> dict[str, float]:
    """What heartbeats show beside the metrics of the last step."""
    return {
        "num_unpublished_versions": float(publisher.num_unpublished),
        "num_unreadable_batches": float(prefetcher.num_unreadable),
        **loop.progress.guards.gauges(),
        **tracking.gauges(),
    }


def _publish_first(
    session: Session,
    start: Snapshot,
    publisher: Publisher,
    snapshots: Snapshots,
    evaluations: Evaluations,
    *,
    stores_start: bool,
) -> None:
    """The first version of this lineage, and the evaluation of the start.

    Args:
        stores_start: the store has to hold 0-0 although it is not announced: searchers ask for it.
    """
    if session.fresh:
        publisher.submit(start, num_eval_prompts=evaluations.num_prompts_final)
    else:
        if stores_start:
            publisher.submit(start, announce=False)
        else:
            start.close()
        publisher.submit(snapshots.take(session.first, session.parent))
    publisher.drain()
    if not session.fresh:
        # the evaluation of the start may have been cut off; one that is done is answered as it is
        evaluations.request(session.start, evaluations.num_prompts_final)


def _prefetcher(
    recipe: Recipe, session: Session, buffer: BufferClient, status: Status, stop: threading.Event
) -> Prefetcher:
    def draw(step: int, wait_s: float) -> Batch:
        return buffer.draw_batch(
            BatchRequest(
                trainer_id=session.trainer_id, lineage=session.lineage, step=step, token=session.token, wait_s=wait_s
            )
        )

    return Prefetcher(
        draw,
        status=status,
        first_step=session.parent.step + 1,
        last_step=recipe.trainer.num_steps,
        ahead=recipe.trainer.prefetch_batches,
        batch_wait_s=recipe.trainer.batch_wait_s,
        batch_deadline_s=recipe.buffer.batch_deadline_s,
        stop=stop,
    )
