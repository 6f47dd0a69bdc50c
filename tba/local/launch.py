"""From a recipe to a finished local run: check everything that can be checked, then hand over to the supervisor."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tba.config import Recipe
from tba.doctor.probes.gpu import check_devices
from tba.errors import ChildError, TbaError
from tba.local.console import Console
from tba.local.origin import check_offline, copy_origin, find_origin
from tba.local.outputs import delete_run_objects, result_lines
from tba.local.prepare import prepare_at_start
from tba.local.prepared import check_prepared
from tba.local.prompts import prompts_of
from tba.local.redis_server import find_redis_server
from tba.local.resolve import check_model, with_absolute_paths, with_real_addresses
from tba.local.resuming import RecipeFile
from tba.local.run_folder import RunFolder
from tba.local.scored_tasks import check_tasks, tasks_of_recipe
from tba.local.services import Services
from tba.local.supervisor import StopRequestedError, Supervisor
from tba.local.trial import try_scorers
from tba.store import ObjectStore, open_store
from tba.store.file import disk_full
from tba.tokens import role_token

EXIT_INTERRUPTED = 130
LOCAL_ROLES = ("searcher", "trainer", "operator")
"""Roles whose tokens a local run needs, where it has tokens at all."""


def run_folder_of(recipe: Recipe) -> RunFolder:
    """runs/<name>/, where `runs` is local.runs_dir."""
    return RunFolder(Path(recipe.local.runs_dir) / recipe.run.name)


def run_local(
    recipe: Recipe,
    *,
    recipe_file: RecipeFile | None,
    folder: RunFolder,
    resume: bool,
    fresh: bool,
    console: Console,
    resume_command: str,
) -> int:
    """Run a recipe on this machine and return the exit code: 0, or 130 after Ctrl-C.

    Nothing of an older run is deleted before every check has passed.

    Raises:
        TbaError: something is missing, wrong or in use, or (ChildError) the run failed.
    """
    original = with_absolute_paths(recipe)
    check_offline(original)
    prepare_at_start(original, console)
    check_prepared(original)
    redis_binary = find_redis_server(recipe.local.redis_server)
    needs_warm_start = check_model(original)
    prompts = prompts_of(original)
    for role in LOCAL_ROLES:
        role_token(original.auth.tokens_file, role)
    check_tasks(prompts, tasks_of_recipe(original))
    check_devices(original)
    if not resume and original.reward.tasks:  # the built-in tasks are known to work
        try_scorers(original, prompts, networks=False, http=True).check()
    with folder.acquire(resume=resume, fresh=fresh) as lock_fd:
        supervisor = None
        try:
            config, redis_port, store = _prepare(original, folder, resume=resume, fresh=fresh, console=console)
            supervisor = Supervisor(
                config,
                original=original,
                recipe_file=recipe_file,
                folder=folder,
                services=Services(config, folder, environ=os.environ, redis_binary=redis_binary, redis_port=redis_port),
                store=store,
                prompts=prompts,
                console=console,
                redis_port=redis_port,
                needs_warm_start=needs_warm_start,
                lock_fd=lock_fd,
            )
            summary = asyncio.run(supervisor.run())
        except StopRequestedError:
            _discard_unbegun(folder, keep_logs=False)
            _note_end(folder, "stopped by Ctrl-C or a signal")
            console.result(_how_to_go_on(folder, resume_command))
            return EXIT_INTERRUPTED
        except TbaError as error:
            made_nothing = supervisor is not None and supervisor.made_nothing and not resume
            kept = _discard_unbegun(folder, keep_logs=True, also_begun=made_nothing)
            text = str(error) if kept is None else str(error).replace(str(folder.logs_path), str(kept))
            how = isinstance(error, ChildError) or (supervisor is not None and folder.has_begun)
            if supervisor is not None:  # else an older run is there as it was
                _note_end(folder, text)
            error.args = (f"{text}; {_how_to_go_on(folder, resume_command)}" if how else text,)
            raise
        except OSError as error:
            _discard_unbegun(folder, keep_logs=False)
            what = disk_full(error, folder.path.parent, tempfile.gettempdir())
            if what is None:
                raise
            _note_end(folder, what)
            raise ChildError(f"{what}; {_how_to_go_on(folder, resume_command)}") from None
        except BaseException:
            _discard_unbegun(folder, keep_logs=False)
            raise
        _note_end(folder, "it is done")
    for line in result_lines(summary, folder):
        console.result(line)
    return 0


def _prepare(
    original: Recipe, folder: RunFolder, *, resume: bool, fresh: bool, console: Console
) -> tuple[Recipe, int, ObjectStore]:
    """Choose ports, check the store and make room for a run that begins; the recipe of the services, the port of Redis
    and the store.

    Raises:
        TbaError: a port is in use, or the store or what the run begins with cannot be used.
    """
    config, redis_port = with_real_addresses(original, folder)
    store = open_store(config.store)
    store.check(write=True)
    origin = None if resume else find_origin(config, store, runs_dir=folder.path.parent)
    if not resume:
        if not store.url.startswith(f"file://{folder.path}/"):
            delete_run_objects(store, run=original.run.name, allowed=fresh)
        folder.clear()
    folder.make_folders()
    folder.ended_path.unlink(missing_ok=True)
    if origin is not None and (num_objects := copy_origin(origin, store)):
        console.say(f"copied {num_objects} objects of {origin.source} from {origin.store.url}")
    folder.write_json(folder.config_path, config.model_dump(mode="json"))
    return config, redis_port, store


def _note_end(folder: RunFolder, reason: str) -> None:
    """Say in a run folder that is left when and why it came to rest; a full disk may keep it from being written."""
    if folder.path.is_dir():
        with suppress(OSError):
            folder.write_json(folder.ended_path, {"at_s": time.time(), "reason": reason})


def _discard_unbegun(folder: RunFolder, *, keep_logs: bool, also_begun: bool = False) -> Path | None:
    """Leave no run folder of a start that failed; where its logs went. A run that has begun is kept, to be resumed."""
    if folder.has_begun and not also_begun:
        return None
    return folder.discard(keep_logs=keep_logs)


def _how_to_go_on(folder: RunFolder, command: str) -> str:
    if folder.has_begun:
        return f"resume with: {command} --resume"
    return f"training had not begun; start again with: {command}"
