"""End a trainer: interrupt a run after SIGTERM, so that it can be resumed, or finish a run that is over.

While a trainer starts, signals end it at once (tba/early_signals.py); `stop_on_signals` replaces that during training.
"""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tba.api import RunCommand, RunInfo
from tba.config import Recipe
from tba.errors import StoreUnavailableError, WaitTimeoutError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.weights.export import RunFacts, write_export
from tba_trainer.learner.guards import holds_checkpoints
from tba_trainer.loop import limits
from tba_trainer.loop.checkpoint_writer import CheckpointWriter
from tba_trainer.loop.trainer_context import LineageContext

RunEnd = Literal["done", "stopped"]
"""How a trainer ends without an error: the run is over, or it was told to stop and the run can be resumed."""
_RETRY_PAUSE_S = 1.0
log = get_logger("shutdown")


def interrupt(context: LineageContext, writer: CheckpointWriter) -> None:
    """Write a last checkpoint after SIGTERM, unless an alarm holds checkpoints back; the run can be resumed.

    Raises:
        StoreUnavailableError: the last checkpoint cannot be written; a resume continues from an older one.
    """
    context.status.set_state("stopping")
    progress = context.progress
    if holds_checkpoints(context.recipe.trainer.guards, progress.guards):
        writer.complete_upload()  # it was taken before the alarm
        # an alarm that could roll back is on: a checkpoint from here would be one that the rollback has to undo
        log.warning("stopped_without_checkpoint", step=progress.step, resume_from=str(writer.saved))
        context.status.set_state("stopped")
        return
    try:
        writer.save()
    except StoreUnavailableError as error:
        raise StoreUnavailableError(
            f"stopped at step {progress.step} without a checkpoint of it ({error}); a resume repeats the steps "
            f"after {writer.saved.step}"
        ) from None
    context.status.set_state("stopped")
    log.info("stopped", version=str(progress.version))


def finish(context: LineageContext, writer: CheckpointWriter, *, early_end: str | None) -> RunEnd:
    """Publish, checkpoint, evaluate, export and mark the run done. If SIGTERM comes first, interrupt the run instead.

    Args:
        writer: writes the checkpoints of this lineage.
        early_end: why the run is over before `num_steps`; None: it is not.
    """
    progress, recipe = context.progress, context.recipe
    progress.stop_clock()
    context.status.set_state("finishing")
    if context.publisher.submitted != progress.version:
        context.publisher.publish(context.snapshots, progress.version)
    context.publisher.drain()  # searchers can evaluate only a version that is announced
    if not context.stop.is_set():
        # Asked for first: searchers evaluate while the checkpoint is written.
        evaluation = context.evaluations.request(progress.version, recipe.eval.num_prompts_final)
        _retry_until_stored(context, "the last checkpoint", writer.save)
        context.publisher.delete_old_versions()
        if evaluation is not None:
            context.evaluations.wait(evaluation, context.status, context.stop)
        if recipe.trainer.export:  # after the evaluation: its result is on the model card
            _retry_until_stored(
                context,
                "the export",
                lambda: upload_export(recipe, context.buffer.run(), context.store, last=progress.version),
            )
    # SIGTERM at any moment before this line leaves the run to be resumed; a resume does all of the above again.
    if context.stop.is_set():
        interrupt(context, writer)
        return "stopped"
    reason = f"trained to version {progress.version}"
    if early_end is not None:
        reason += f", step {progress.step} of {recipe.trainer.num_steps}: {early_end}"
    context.buffer.command("done", RunCommand(reason=reason, token=context.session.token))
    context.status.set_state("done")
    log.info("done", version=str(progress.version), train_s=round(progress.train_s, 1))
    return "done"


def upload_export(recipe: Recipe, info: RunInfo, store: ObjectStore, *, last: PolicyVersion) -> str:
    """Upload the last version with its model card, and return its prefix in the store. A second export replaces it.

    Args:
        info: the run as the buffer knows it: evaluations and the best version go on the card.
        last: the last published version.

    Raises:
        StoreError: the store is away, or its copy of the version is damaged.
    """
    prefix, versions = f"runs/{recipe.run.name}/export/", WeightVersions(store, recipe.run.name)
    facts = RunFacts(recipe=recipe, evals=info.evals, best=info.best)
    # Written to this machine first: a version that turns out to be damaged leaves the old export as it was.
    with tempfile.TemporaryDirectory(prefix="tba-export-") as name:
        write_export(versions, last, Path(name), facts)
        paths = {prefix + path.name: path for path in sorted(Path(name).iterdir())}
        for key, path in paths.items():
            store.put_file(key, path)
    # only now: until the new files are there, the old export is a whole one
    for key in set(store.list(prefix)) - paths.keys():
        store.delete(key)
    log.info("exported", version=str(last), prefix=prefix, store=store.url)
    return prefix


def _retry_until_stored(context: LineageContext, what: str, action: Callable[[], object]) -> None:
    """Repeat an action while the store is away, until SIGTERM. After RETRY_S raise WaitTimeoutError, naming `what`."""
    wait_s = limits.RETRY_S
    deadline = time.monotonic() + wait_s
    with context.status.named_wait("object-store", wait_s):
        while not context.stop.is_set():
            try:
                action()
                return
            except StoreUnavailableError as error:
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"{what} could not be stored within {wait_s:g} s: {error}") from None
                log.warning("store_away", what=what, error=str(error))
                context.stop.wait(_RETRY_PAUSE_S)


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Make SIGTERM and SIGINT only set the event. Do nothing outside the main thread, which alone has handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler runs in the middle of whatever the main thread does, possibly while that holds the lock of a logger or
    # of the event. So the handler does nothing: Python writes the signal's number to this socket, and a thread that may
    # wait for locks reads it.
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # a handler must never block

    def listen() -> None:
        while data := reader.recv(1):
            log.info("signal", name=signal.Signals(data[0]).name)
            stop.set()

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        writer.close()  # ends the listener
        listener.join()
        reader.close()
