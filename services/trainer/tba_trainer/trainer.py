"""Build a trainer from a recipe and run it: the composition root, the only module that knows every other."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path

import torch

from tba.clients import BufferClient
from tba.clients.service_client import START_WAIT_S
from tba.config import Recipe
from tba.early_signals import EXIT_STOPPED, mark_started
from tba.errors import TeamError, UnavailableError, WaitTimeoutError
from tba.logs import get_logger
from tba.store import ObjectStore, open_store
from tba.store.open import wait_for_store
from tba.temporary_folders import temporary_folder
from tba.tokens import client_token
from tba.versions import START
from tba.weights import WeightVersions, check_redis_is_newest, sha256_of_file
from tba_trainer.checkpoints import weight_files
from tba_trainer.checkpoints.weight_files import WeightSnapshot
from tba_trainer.distributed.checkpoints import TeamCheckpoints
from tba_trainer.distributed.follower import follow
from tba_trainer.distributed.leader import build
from tba_trainer.distributed.process_group import Team
from tba_trainer.learner.guards import Rollback
from tba_trainer.learner.schedules import Schedules
from tba_trainer.loop import limits
from tba_trainer.loop.batches import Prefetcher, Requirements, draw_batch
from tba_trainer.loop.evaluations import Evaluations
from tba_trainer.loop.publisher import Publisher
from tba_trainer.loop.shutdown import RunEnd, stop_on_signals
from tba_trainer.loop.startup import LineageStart, check_starting_model, delete_incomplete, wait_for_origin
from tba_trainer.loop.status import ALIVE_FILE_VARIABLE, Heartbeats, Progress, Status
from tba_trainer.loop.trainer_context import LineageContext, TrainerContext
from tba_trainer.loop.training_loop import TrainingLoop
from tba_trainer.model.policy import side_files
from tba_trainer.tracking import open_trackers

_POLL_S = 1.0
_SIGNAL_SPREAD_S = 1.0
"""How long a follower that has lost the leader waits for its own signal: torchrun signals one process after another."""
log = get_logger("run")


def run_trainer(recipe: Recipe) -> int:
    """Run one trainer, or one of its processes where torchrun started it, until the run is over or SIGTERM arrives.

    Returns:
        The exit code: 0 when the run is over, 143 when it was told to stop before. On one machine only the leader
        returns 143 and its followers return 0. On several machines, each a pod of its own, all processes return 143.
    """
    torch.set_num_threads(recipe.trainer.torch_num_threads)
    section = recipe.trainer
    if section.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; cuBLAS needs it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    context, deadline_s = section.sharding.context, section.collective_timeout_s
    with Team.join(device=section.device, deadline_s=deadline_s, context=context) as team:
        if team.is_leader:
            # the leader alone talks to the buffer: followers get batches and commands over the process group
            token = client_token(recipe.auth.tokens_file, "trainer")
            buffer = BufferClient(recipe.buffer_url, token=token, retry_s=limits.RETRY_S, ca_file=recipe.tls.ca_file)
            stop = threading.Event()
            team.start_beats(on_loss=stop.set)
            try:
                end = train(recipe, buffer=buffer, store=open_store(recipe.store), stop=stop, team=team)
                team.run_is_over = end == "done"
            finally:
                buffer.close()
        else:
            _follow(recipe, team)
    counts = team.is_leader or team.num_local_ranks < team.num_ranks
    return EXIT_STOPPED if counts and not team.run_is_over else 0


def _follow(recipe: Recipe, team: Team) -> None:
    # a signal ends no follower by itself: the leader gets it too, and tells the followers when it is over
    signalled = threading.Event()
    with stop_on_signals(signalled):
        try:
            follow(recipe, team)
        except TeamError:
            # a leader that is still starting ends at once on SIGTERM, without a word; then the loss is expected
            if not signalled.wait(_SIGNAL_SPREAD_S):
                raise
            log.info("leader_is_gone", rank=team.rank)


def train(
    recipe: Recipe, *, buffer: BufferClient, store: ObjectStore, stop: threading.Event, team: Team | None = None
) -> RunEnd:
    """Train with the given services, in the leader of a team, until the run is over or `stop` is set.

    Args:
        team: the processes that train together; None: this one alone.
        stop: set when the process should finish its step, write a checkpoint and return. Signals set it during
            training. During the start, also after a rollback, there is nothing to keep, and they end the process at
            once (tba/early_signals.py).

    Returns:
        "done" if the run is over, "stopped" if training was stopped before.
    """
    context = TrainerContext(
        recipe=recipe,
        team=team or Team.alone(recipe.trainer.device),
        buffer=buffer,
        store=store,
        status=Status(trainer_id=f"trainer-{socket.gethostname()}-{os.getpid()}", run=recipe.run.name),
        trackers=open_trackers(recipe, buffer),
        stop=stop,
    )
    rollback: Rollback | None = None
    try:
        while True:
            # one per lineage: nothing of a rolled-back lineage can be published
            with temporary_folder("tba-trainer-") as folder:
                end = _train_lineage(context, folder=folder, rollback=rollback)
            if not isinstance(end, Rollback):
                return end
            rollback = end
            gc.unfreeze()
            gc.collect()  # the old model must go before the next one is built: on a GPU both may not fit
    finally:
        context.trackers.close()


def _wait_for_buffer(buffer: BufferClient, stop: threading.Event) -> None:
    """Wait until the buffer answers (the wait `buffer-start`): it may start later than the trainer."""
    deadline_s = time.monotonic() + START_WAIT_S
    while not stop.is_set():
        try:
            buffer.run()
            return
        except UnavailableError as error:
            if (left_s := deadline_s - time.monotonic()) < 0:
                raise WaitTimeoutError(f"wait 'buffer-start': no answer within {START_WAIT_S:g} s: {error}") from None
            log.warning("waits", wait="buffer-start", deadline_in_s=left_s, reason=str(error))
            stop.wait(_POLL_S)


def _train_lineage(context: TrainerContext, *, folder: Path, rollback: Rollback | None) -> Rollback | RunEnd:
    """Train one lineage from the last checkpoint to its end. After a rollback it starts as a restarted process does.

    Args:
        folder: folder for large files of this lineage.
        rollback: how the lineage before this one ended; None: this is the first one of the process.
    """
    recipe, buffer, store = context.recipe, context.buffer, context.store
    # Before the model is loaded, which may take minutes: a store that refuses writes is reported at once.
    wait_for_store(store, wait_s=START_WAIT_S, on_progress=lambda said: log.warning("waits", reason=said))
    model, learner, snapshots = build(recipe, context.team, folder=folder)
    files = side_files(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    model_config_sha256 = sha256_of_file(files["config.json"])
    versions = WeightVersions(store, recipe.run.name)
    checkpoints = TeamCheckpoints(
        store,
        recipe.run.name,
        folder=folder,
        max_bytes=weight_files.FILE_BYTES,
        team=context.team,
        layout=learner.layout(),
        retry_s=limits.RETRY_S,
        named_wait=context.status.named_wait,
    )
    start = snapshots.take(START, None)  # before a checkpoint replaces the starting weights
    start.write()
    _wait_for_buffer(buffer, context.stop)
    origin = wait_for_origin(buffer, wait_s=recipe.trainer.batch_wait_s, stop=context.stop)
    if context.stop.is_set():
        return "stopped"
    # Before a lineage is taken: from then on an older trainer of the run is fenced off.
    check_redis_is_newest(store, recipe.run.name, buffer.run)
    check_starting_model(start, versions, origin)
    session = LineageStart(
        context=context,
        checkpoints=checkpoints,
        learner=learner,
        model_config_sha256=model_config_sha256,
        rollback=rollback,
    ).take()
    context.trackers.start(session.lineage, session.parent)
    delete_incomplete(versions, checkpoints, before_lineage=session.lineage, registered=session.parent)
    evaluations = Evaluations(
        buffer,
        recipe.eval,
        token=session.token,
        start_step=session.parent.step,
        sync_interval=recipe.trainer.sync_interval,
        enabled=not recipe.is_offline,
    )
    publishes_adapter = recipe.model.lora is not None
    lineage = LineageContext(
        **vars(context),
        session=session,
        progress=Progress(session),
        checkpoints=checkpoints,
        learner=learner,
        schedules=Schedules(recipe, buffer),
        requirements=Requirements.of(recipe, model),
        snapshots=snapshots,
        prefetcher=Prefetcher(
            partial(draw_batch, buffer, session),
            status=context.status,
            first_step=session.parent.step + 1,
            last_step=recipe.trainer.num_steps,
            ahead=recipe.trainer.prefetch_batches,
            batch_wait_s=recipe.trainer.batch_wait_s,
            batch_deadline_s=recipe.buffer.batch_deadline_s,
            stop=context.stop,
        ),
        publisher=Publisher(
            section=recipe.trainer,
            session=session,
            buffer=buffer,
            versions=versions,
            checkpoints=checkpoints,
            evaluations=evaluations,
            status=context.status,
            files=files,
            start=start if publishes_adapter else None,
            stop=context.stop,
        ),
        evaluations=evaluations,
        model_config_sha256=model_config_sha256,
    )
    # searchers that compute ref log-probs or the KL of an evaluation download 0-0, and adapters are merged into it
    stores_start = (recipe.searchers_hold_start or publishes_adapter) and not versions.exists(START)
    return _train_to_end(lineage, start, stores_start=stores_start)


def _train_to_end(lineage: LineageContext, start: WeightSnapshot, *, stores_start: bool) -> Rollback | RunEnd:
    """Publish the first version, train, then close prefetcher, publisher and heartbeats.

    Args:
        start: the starting weights.
        stores_start: store `start` even if it is not announced, for searchers or as the base of adapters.
    """
    session, publisher, num_prompts = lineage.session, lineage.publisher, lineage.recipe.eval.num_prompts_final
    alive_file = os.environ.get(ALIVE_FILE_VARIABLE)
    heartbeats = Heartbeats(
        lineage.buffer, lineage.status, lineage.gauges, alive_file=Path(alive_file) if alive_file else None
    )
    heartbeats.start()
    publisher.start()
    end = None
    try:
        lineage.status.set_state("publishing")
        if session.announces_start:
            publisher.submit(start, num_eval_prompts=num_prompts)
        else:
            if stores_start:
                publisher.submit(start, announce=False)
            else:
                publisher.discard(start)
            publisher.publish(lineage.snapshots, session.first)
            lineage.learner.remember(session.first, same_as=session.parent)
        publisher.drain()  # no step before that: the searchers' first rollouts would otherwise be old at once
        if not session.announces_start:
            # a crash may have cut the evaluation of the start off; the buffer answers a finished one as it is
            lineage.evaluations.request(session.start, num_prompts)
        # what the start has made stays: to search modules of torch and transformers for cycles takes 0.15 s each time
        gc.freeze()
        with stop_on_signals(lineage.stop):
            try:
                lineage.prefetcher.start()
                end = TrainingLoop(lineage).run()
                if isinstance(end, Rollback) and lineage.stop.is_set():
                    lineage.status.set_state("stopped")  # an operator's rollback waits for the next start
                    return "stopped"
                return end
            finally:
                # After a rollback a signal ends the process at once again. After any other end it changes nothing: the
                # exit code is that of what has been done.
                if not isinstance(end, Rollback):
                    mark_started()
    finally:
        lineage.prefetcher.close()
        publisher.close()
        heartbeats.close()  # last: its final beat tells the buffer how it ended
