"""From a recipe to a finished local run: check everything that can be checked, then hand over to the supervisor."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tba.config import Recipe
from tba.errors import ChildError
from tba.local.console import Console
from tba.local.origin import check_offline, copy_origin, find_origin
from tba.local.outputs import delete_run_objects, result_lines
from tba.local.prepared import check_prepared
from tba.local.prompts import prompts_of
from tba.local.redis_server import find_redis_server
from tba.local.resolve import check_model, with_absolute_paths, with_real_addresses
from tba.local.run_folder import RunFolder
from tba.local.services import Services
from tba.local.supervisor import StopRequestedError, Supervisor
from tba.store import open_store
from tba.tokens import role_token

EXIT_INTERRUPTED = 130
LOCAL_ROLES = ("searcher", "trainer", "operator")
"""Roles whose tokens a local run needs, where it has tokens at all."""


def run_folder_of(recipe: Recipe) -> RunFolder:
    """runs/<name>/, where `runs` is local.runs_dir."""
    return RunFolder(Path(recipe.local.runs_dir) / recipe.run.name)


def run_local(
    recipe: Recipe, *, folder: RunFolder, resume: bool, fresh: bool, console: Console, resume_command: str
) -> int:
    """Run a recipe on this machine and return the exit code: 0, or 130 after Ctrl-C.

    Nothing of an older run is deleted before every check has passed.

    Raises:
        TbaError: something is missing, wrong or in use, or (ChildError) the run failed.
    """
    original = with_absolute_paths(recipe)
    check_offline(original)
    check_prepared(original)
    redis_binary = find_redis_server(recipe.local.redis_server)
    needs_warm_start = check_model(original)
    prompts = prompts_of(original)
    for role in LOCAL_ROLES:
        role_token(original.auth.tokens_file, role)
    with folder.acquire(resume=resume, fresh=fresh) as lock_fd:
        config, redis_port = with_real_addresses(original, folder)
        store = open_store(config.store)
        store.check(write=True)
        origin = None if resume else find_origin(config, store, runs_dir=folder.path.parent)
        if not resume:
            if not store.url.startswith(f"file://{folder.path}/"):
                delete_run_objects(store, run=recipe.run.name, allowed=fresh)
            folder.clear()
        folder.make_folders()
        if origin is not None and (num_objects := copy_origin(origin, store)):
            console.say(f"copied {num_objects} objects of {origin.source} from {origin.store.url}")
        folder.write_json(folder.config_path, config.model_dump(mode="json"))
        services = Services(config, folder, environ=os.environ, redis_binary=redis_binary, redis_port=redis_port)

        async def supervise() -> int:
            supervisor = Supervisor(
                config,
                original=original,
                folder=folder,
                services=services,
                store=store,
                prompts=prompts,
                console=console,
                redis_port=redis_port,
                needs_warm_start=needs_warm_start,
                lock_fd=lock_fd,
            )
            try:
                summary = await supervisor.run()
            except StopRequestedError:
                console.result(_how_to_go_on(folder, resume_command))
                return EXIT_INTERRUPTED
            for line in result_lines(summary, folder):
                console.result(line)
            return 0

        try:
            return asyncio.run(supervise())
        except ChildError as error:
            raise ChildError(f"{error}; {_how_to_go_on(folder, resume_command)}") from None


def _how_to_go_on(folder: RunFolder, command: str) -> str:
    if folder.has_begun:
        return f"resume with: {command} --resume"
    return f"training had not begun; start again with: {command}"
