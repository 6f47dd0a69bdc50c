"""Whether buffer and reward service answer and are ready, and what the run says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tba.api import RunInfo
from tba.doctor.finding import Finding, fail, ok, skip, warn
from tba.doctor.patient import Answer, Patient, TlsTrouble
from tba.errors import ConfigError
from tba.tokens import load_tokens


def probe_services(patient: Patient) -> Iterator[Finding]:
    """Health of the services, and the run."""
    services: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
    for service in services:
        answer = patient.ask(service, "/readyz")
        if isinstance(answer, Answer):
            yield _health(service, answer)
        elif isinstance(answer, TlsTrouble):
            yield fail(
                "service",
                f"the {service} service: {answer}",
                "docs/operations.md, TLS, says more",
            )
        elif patient.is_local and not patient.is_going:
            yield skip("service", f"the {service} service is not running; `tba run` starts it")
        else:
            yield warn(
                "service",
                f"the {service} service: {answer}",
                f"start it, or correct {service}.url; in a cluster: does a NetworkPolicy let this pod through?",
            )
    yield from _run(patient)


def _health(service: str, answer: Answer) -> Finding:
    if answer.status == 200:
        return ok("service", f"the {service} service is ready ({answer.took_s * 1000:.0f} ms)")
    return fail(
        "service",
        f"the {service} service answers {answer.status}: {answer.detail}",
        "the sentence says what it waits for; its log says more",
    )


def _run(patient: Patient) -> Iterator[Finding]:
    answer = patient.ask("buffer", "/v1/run", token=some_token(patient))
    if not isinstance(answer, Answer) or answer.status != 200:
        return  # the findings above, or those about tokens, say why
    try:
        run = RunInfo.model_validate_json(answer.body)
    except ValueError:
        yield skip("run", "the buffer's answer is not what this release expects; see release-services")
        return
    alive = [component for component in run.components if component.alive]
    kinds = ", ".join(sorted({component.kind for component in alive})) or "none"
    text = f"run {run.run!r} is {run.state} at step {run.step}; alive: {kinds}"
    if run.state == "failed":
        yield fail(
            "run", f"{text}: {run.state_reason}", "mend what the reason names; a new trainer goes on with the run"
        )
    else:
        yield ok("run", text)
    for component in run.components:
        if (
            not component.alive
            and component.kind == "trainer"
            and run.state == "running"
            and not _has(alive, "trainer")
        ):
            yield warn(
                "run-trainer",
                f"{component.component_id} has been silent for {component.heartbeat_age_s:.0f} s, and no other trainer "
                "is there",
                "look at its log; start it again, and it goes on from its last checkpoint",
            )
            break
    for wait in run.waits:
        if wait.deadline_in_s < 0:
            yield warn(
                "run-waits",
                f"{wait.owner} waits ({wait.name}) for {wait.for_s:.0f} s, {-wait.deadline_in_s:.0f} s too long",
                "docs/operations.md, Flow, says who ends this wait; look at that one's log",
            )


def _has(components: list, kind: str) -> bool:
    return any(component.kind == kind for component in components)


def some_token(patient: Patient) -> str | None:
    """A token that may look at the run; None without authentication, or without a file that can be read."""
    try:
        tokens = load_tokens(patient.recipe.auth.tokens_file) or {}
    except ConfigError:
        return None
    return next((tokens[role] for role in ("viewer", "operator", "searcher", "trainer") if role in tokens), None)
