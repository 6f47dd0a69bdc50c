"""Launch a local run: check everything that can be checked, then start the supervisor, and explain how it ended."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.errors import ChildError, ConfigError, TbaError
from tba.store import ObjectStore, open_store
from tba.store.file import explain_full_disk
from tba.tokens import role_token
from tba_cli.artifacts.prepared import check_prepared
from tba_cli.console import Console
from tba_cli.doctor.checks.machine import check_devices
from tba_cli.local.reward_trial import try_scorers
from tba_cli.local.supervisor import StopRequestedError, Supervisor
from tba_cli.prompts.reader import check_tasks, prompt_warnings, prompts_of, tasks_of_recipe
from tba_cli.redis_server import find_redis_server
from tba_cli.reports.outputs import result_lines
from tba_cli.resolve import check_installed, check_model, seed_warning, with_absolute_paths, with_real_addresses
from tba_cli.run_folder import RunFolder
from tba_cli.setup.environment_trial import try_environment
from tba_cli.setup.model_recipe import rate_warning
from tba_cli.setup.origin import check_searchers, copy_origin, find_origin
from tba_cli.setup.prepare import endless_warning, prepare_at_start, try_model
from tba_cli.sizing.machine import bfloat16_warning

EXIT_INTERRUPTED = 130
LOCAL_ROLES = ("searcher", "trainer", "operator")
"""Roles whose tokens a local run needs, if it has tokens."""
STORE_TIMEOUT_S = 5.0
"""Deadline of one operation while the store is checked; short, because a person waits."""


def run_folder_of(recipe: Recipe) -> RunFolder:
    """Return runs/<name>/, where `runs` is local.runs_dir."""
    return RunFolder(Path(recipe.local.runs_dir) / recipe.run.name)


def run_local(
    recipe: Recipe,
    *,
    document: dict[str, Any],
    folder: RunFolder,
    resume: bool,
    fresh: bool,
    console: Console,
    resume_command: str,
) -> int:
    """Run a recipe on this machine and return the exit code: 0, or 130 after Ctrl-C.

    Nothing of an older run is deleted before every check has passed.

    Args:
        document: the content of the recipe's file; it is stored, and a resume compares the file with it.

    Raises:
        TbaError: something is missing, wrong or in use, or (ChildError) the run failed.
    """
    console.info("checking the recipe, its prompts, model and scorers")
    original = with_absolute_paths(recipe)
    check_searchers(original)
    # first what takes no time: to fetch or train a model may take long
    find_redis_server()
    check_installed(original)
    for role in LOCAL_ROLES:
        role_token(original.auth.tokens_file, role)
    check_devices(original)
    prepare_at_start(original, console)
    check_prepared(original)
    needs_warm_start = check_model(original)
    prompts = prompts_of(original)
    endless = None if needs_warm_start else endless_warning(original, prompts)
    of_run = (rate_warning(original), bfloat16_warning(original), seed_warning(original), endless)
    for warning in filter(None, (original.temperature_warning, *of_run, *prompt_warnings(original, prompts))):
        console.result(f"warning: {warning}")
    check_tasks(prompts, tasks_of_recipe(original))
    for task, section in original.environments.items():
        if not resume and not section.is_remote:
            try_environment(original, task, prompts)
    if not resume and original.reward.tasks:  # the built-in tasks need no trial
        trial = try_scorers(original, prompts, http=True)
        trial.check()
        for warning in filter(None, map(trial.failures, trial.tried)):
            console.result(f"warning: {warning}")
    with folder.acquire(resume=resume, fresh=fresh) as lock_fd:
        supervisor = None
        try:
            config, store = _prepare(original, folder, resume=resume, fresh=fresh, console=console)
            if not resume:
                folder.write_json(folder.recipe_file_path, document)
            supervisor = Supervisor(
                recipe=config,
                original=original,
                folder=folder,
                store=store,
                prompts=prompts,
                console=console,
                needs_warm_start=needs_warm_start,
                lock_fd=lock_fd,
            )
            summary = asyncio.run(supervisor.run())
        except StopRequestedError:
            _note_end(folder, "stopped by Ctrl-C or a signal")
            console.result(_next_command(folder, resume_command))
            return EXIT_INTERRUPTED
        except TbaError as error:
            text = str(error)
            # a refused recipe would be refused again
            is_over = supervisor is not None and folder.has_begun and not isinstance(error, ConfigError)
            can_resume = isinstance(error, ChildError) or is_over
            if supervisor is not None:  # else the folder still holds an older run as it was
                _note_end(folder, text)
            error.args = (f"{text}; {_next_command(folder, resume_command)}" if can_resume else text,)
            raise
        except OSError as error:
            what = explain_full_disk(error, folder.path.parent, tempfile.gettempdir())
            if what is None:
                raise
            _note_end(folder, what)
            raise ChildError(f"{what}; {_next_command(folder, resume_command)}") from None
        finally:
            folder.discard_empty()
        _note_end(folder, "it is done")
    for line in result_lines(summary, folder):
        console.result(line)
    return 0


def _prepare(
    original: Recipe, folder: RunFolder, *, resume: bool, fresh: bool, console: Console
) -> tuple[Recipe, ObjectStore]:
    """Choose the addresses of the services, check the store, and write the recipe into the folder of the run.

    Unless the run resumes, also try the starting model, delete an older run of that name, and copy the origin: the
    snapshot, and for a fork the weight version, with which the new run begins.

    Returns:
        The recipe of the services, and the store.

    Raises:
        TbaError: a port is in use; the store, the origin or the starting model cannot be used; the store holds another
            run of that name, and `fresh` is false.
    """
    config = with_real_addresses(original, folder)
    open_store(config.store, timeout_s=STORE_TIMEOUT_S).check(write=True)
    store = open_store(config.store)
    origin = None if resume else find_origin(config, store, runs_dir=folder.path.parent)
    if not resume:
        if (Path(original.model.path) / "config.json").is_file():  # else a warm start makes it
            try_model(original)
        # a store inside the folder is deleted with the folder
        if not store.url.startswith(f"file://{folder.path}/"):
            keys = store.list(f"runs/{original.run.name}/")
            # weights of two runs under one name would be mixed
            if keys and not fresh:
                raise ConfigError(
                    f"object store {store.url} already holds {len(keys)} objects of a run named "
                    f"{original.run.name!r}; give another name with --run-name, or delete them with --fresh"
                )
            for key in keys:
                store.delete(key)
        # every check has passed: from here on an older run is deleted
        folder.clear()
    folder.make_folders()
    if origin is not None and (num_objects := copy_origin(origin, store)):
        console.info(f"copied {num_objects} objects of {origin.source} from {origin.store.url}")
    folder.write_json(folder.config_path, config.model_dump(mode="json"))
    return config, store


def _note_end(folder: RunFolder, reason: str) -> None:
    """Write when and why the run ended."""
    with suppress(OSError):  # a full disk must not hide the reason of the end
        folder.write_json(folder.ended_path, {"at_s": time.time(), "reason": reason})


def _next_command(folder: RunFolder, command: str) -> str:
    if folder.has_begun:
        return f"resume with: {command} --resume"
    return f"training had not begun; start again with: {command}"
