"""Builds a trainer from a recipe and runs it. The only module that knows every other."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np
import torch

from tba.api import BatchRequest
from tba.clients import BufferClient
from tba.config import Recipe
from tba.logs import get_logger
from tba.store import ObjectStore, open_store
from tba.tokens import role_token
from tba.weights import WeightVersions, sha256_of_file
from tba.wire import Batch
from tba_trainer.checkpoint import Checkpoints
from tba_trainer.collect import Collector, delete_incomplete
from tba_trainer.evaluations import Evaluations
from tba_trainer.learner import Learner
from tba_trainer.loop import TrainingLoop
from tba_trainer.model import load_policy, side_files
from tba_trainer.prefetch import Prefetcher
from tba_trainer.publisher import Publisher
from tba_trainer.signals import stop_on_signals
from tba_trainer.snapshots import Snapshot, Snapshots
from tba_trainer.startup import Session, begin, check_starting_model, starting_snapshot, wait_for_origin
from tba_trainer.status import Heartbeats, Status

_RNG_STREAM = 0x7261
"""Keeps the trainer's random numbers apart from those of other services with the same seed."""
log = get_logger("run")


def run_trainer(recipe: Recipe) -> None:
    """Run one trainer until the run is over or SIGTERM arrives.

    Raises:
        TbaError: one clear sentence.
    """
    token = role_token(recipe.auth.tokens_file, "trainer")
    buffer = BufferClient(recipe.buffer_url, token=token, retry_s=recipe.trainer.retry_s)
    with stop_on_signals() as stop:
        try:
            train(recipe, buffer=buffer, store=open_store(recipe.store), stop=stop)
        finally:
            buffer.close()


def train(recipe: Recipe, *, buffer: BufferClient, store: ObjectStore, stop: threading.Event) -> None:
    """The same, with the outside world given.

    Args:
        stop: set when the process should finish its step, write a checkpoint and return.
    """
    torch.set_num_threads(recipe.trainer.torch_num_threads)
    torch.manual_seed(recipe.run.seed)
    model = load_policy(
        recipe.model, device=recipe.trainer.device, gradient_checkpointing=recipe.trainer.gradient_checkpointing
    )
    store.check(write=True)
    files = side_files(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    model_config_sha256 = sha256_of_file(files["config.json"])
    versions, checkpoints = WeightVersions(store, recipe.run.name), Checkpoints(store, recipe.run.name)
    trainer_id = f"trainer-{socket.gethostname()}-{os.getpid()}"
    status = Status(trainer_id=trainer_id, run=recipe.run.name)
    learner = Learner(model, recipe, np.random.default_rng([recipe.run.seed, _RNG_STREAM]))
    snapshots = Snapshots(model, recipe)
    start = starting_snapshot(snapshots)
    origin = wait_for_origin(buffer, wait_s=recipe.trainer.batch_wait_s, stop=stop)
    if stop.is_set():
        return
    check_starting_model(start, versions, origin)
    session = begin(
        recipe,
        trainer_id=trainer_id,
        buffer=buffer,
        store=store,
        checkpoints=checkpoints,
        learner=learner,
        model_config_sha256=model_config_sha256,
    )
    delete_incomplete(versions, checkpoints, before_lineage=session.lineage, registered=session.parent)
    evaluations = Evaluations(
        buffer, recipe.eval, token=session.token, start_step=session.parent.step, enabled=not recipe.is_offline
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
    prefetcher = _prefetcher(recipe, session, buffer, status, stop)
    loop = TrainingLoop(
        recipe,
        session,
        buffer=buffer,
        store=store,
        checkpoints=checkpoints,
        learner=learner,
        snapshots=snapshots,
        publisher=publisher,
        prefetcher=prefetcher,
        evaluations=evaluations,
        status=status,
        files=files,
        model_config_sha256=model_config_sha256,
        stop=stop,
    )
    heartbeats = Heartbeats(buffer, status, lambda: {"num_unpublished_versions": float(publisher.num_unpublished)})
    heartbeats.start()
    publisher.start()
    try:
        status.set_state("publishing")
        _publish_first(session, start, publisher, snapshots, evaluations)
        prefetcher.start()
        loop.run()
    finally:
        prefetcher.close()
        publisher.close()
        heartbeats.close()


def _publish_first(
    session: Session, start: Snapshot, publisher: Publisher, snapshots: Snapshots, evaluations: Evaluations
) -> None:
    """The first version of this lineage, and the evaluation of the start."""
    if session.fresh:
        publisher.submit(start, num_eval_prompts=evaluations.num_prompts_final)
    else:
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
