"""Check the services: readiness and the state of the run, releases, and scored tasks."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterator
from contextlib import suppress

import tba
from tba.api import RewardsReply, RunInfo
from tba.clients.service_client import Reply, error_of
from tba.errors import ConfigError, ServiceError, TlsError
from tba.tokens import load_tokens
from tba_cli.doctor.target import ASKED, CheckResult, Target, fail, ok, skip, warn
from tba_cli.generators import BUILT_IN

LIBRARIES = ("torch", "transformers", "vllm", "pydantic", "boto3", "redis", "datasets")
HEALTHY = {"ok", "idle"}
"""Health of a scorer without a problem; an `idle` scorer starts with its first item."""


def check_services(target: Target) -> Iterator[CheckResult]:
    """Check that the services are ready, and that the run makes progress."""
    for service in ASKED:
        answer = target.ask(service, "/readyz")
        if isinstance(answer, Reply) and answer.status == 200:
            yield ok("service", f"the {service} service is ready")
        elif isinstance(answer, Reply):
            yield fail(
                "service",
                f"the {service} service answers {answer.status}: {error_of(answer)}",
                "the message says what it waits for; its log says more",
            )
        elif isinstance(answer, TlsError):
            yield fail("service", f"the {service} service: {answer}", "docs/security.md, TLS, says more")
        # nothing is wrong: the services of a local run live as long as it
        elif target.is_local and not target.is_going:
            yield skip("service", f"the {service} service is not running; `tba run` starts it")
        else:
            yield warn(
                "service",
                f"the {service} service: {answer}",
                f"start it, or correct {service}.url; in a cluster: does a NetworkPolicy let this pod through?",
            )
    run = target.read("buffer", "/v1/run", RunInfo, token=some_token(target))
    if run is None:
        return  # the results above, or those of the tokens and releases, say why
    # a component that has ended stays in the list for a while
    kinds = ", ".join(sorted({component.kind for component in run.components if component.alive})) or "none"
    text = f"run {run.run!r} is {run.state} at step {run.step}; alive: {kinds}"
    if run.state == "failed":
        yield fail("run", f"{text}: {run.state_reason}", "fix what the reason names; a new trainer continues the run")
    else:
        yield ok("run", text)
    # a wait is normal, and one beyond its deadline is what a person should look at
    for wait in run.waits:
        if wait.deadline_in_s < 0:
            yield warn(
                "run-waits",
                f"{wait.owner} waits ({wait.name}) for {wait.for_s:.0f} s, {-wait.deadline_in_s:.0f} s too long",
                "docs/operations.md, Waits, says which service ends this wait; read the log of that service",
            )


def some_token(target: Target) -> str | None:
    """Return a token that may read the run; None without authentication or without a readable tokens file."""
    try:
        tokens = load_tokens(target.recipe.auth.tokens_file) or {}
    except ConfigError:
        return None
    return next((tokens[role] for role in ("viewer", "operator", "searcher", "trainer") if role in tokens), None)


def check_releases(target: Target) -> Iterator[CheckResult]:
    """Compare the version of tba here with the versions of the services, and show the versions of the libraries."""
    libraries = []
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            libraries.append(f"{name} {importlib.metadata.version(name)}")
    own, python = ", ".join(sorted(target.services)), platform.python_version()
    yield ok("release", f"tba {tba.__version__} ({own}), Python {python}, {', '.join(libraries)}")
    for service in ASKED:
        answer = target.ask(service, "/version")
        if isinstance(answer, ServiceError) or answer.status != 200:
            continue  # the check of the services says why
        try:
            found = dict(json.loads(answer.content))
        except (ValueError, TypeError, RecursionError):  # another server, for example a proxy with a page of its own
            continue
        version, run = found.get("version"), found.get("run")
        if version != tba.__version__:
            yield fail(
                "release-services",
                f"the {service} service runs tba {version}, but this is tba {tba.__version__}",
                "run one release everywhere: give all images one tag",
            )
        elif run != target.recipe.run.name:
            yield fail(
                "release-services",
                f"the {service} service at {target.url(service)} belongs to run {run!r}, but this recipe is for "
                f"run {target.recipe.run.name!r}",
                f"correct {service}.url, or give the services one recipe",
            )
        else:
            yield ok("release-services", f"the {service} service runs tba {version} for run {run!r}")


def check_rewards(target: Target) -> Iterator[CheckResult]:
    """Check that the reward service scores every task that the recipe names, but those that an environment pays."""
    reply = target.read("reward", "/v1/rewards", RewardsReply, token=some_token(target))
    if reply is None:
        yield skip("reward-tasks", "the reward service does not say which tasks it scores")
        return
    known = {reward.task: reward.health for reward in reply.rewards}
    data = target.recipe.data
    # as far as the recipe alone names them; a file is not read
    tasks = [data.generator] if data.generator in BUILT_IN else sorted({section.task for section in data.sets})
    for task in tasks if known else ():
        if task in target.recipe.paid_by_environment:
            yield ok("reward-tasks", f"task {task!r} is paid by its environment")
        elif task not in known:
            yield fail(
                "reward-tasks",
                f"no reward scores the task {task!r}; the service knows {', '.join(sorted(known))}",
                f"give the recipe an entry reward.tasks.{task}, and restart the reward service with it",
            )
        # the health of a task names each scorer that is not well: `name: problem; name: problem`
        elif not {part.rpartition(": ")[2] for part in known[task].split("; ")} <= HEALTHY:
            yield warn("reward-tasks", f"task {task!r}: {known[task]}", "the log of the reward service says why")
        else:
            yield ok("reward-tasks", f"task {task!r} is scored")
