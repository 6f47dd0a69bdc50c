"""Run all checks at the same time, each in a thread, so that a hanging check does not hide the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tba.errors import TbaError
from tba_cli.doctor.checks import Check
from tba_cli.doctor.target import CheckResult, Target, fail

CHECK_TIMEOUT_S = 60.0
"""Deadline of a check; the import of torch from a slow disk takes longest."""


def run_checks(
    target: Target,
    *,
    checks: Sequence[tuple[str, Check]],
    timeout_s: float = CHECK_TIMEOUT_S,
    on_result: Callable[[CheckResult], None] = lambda result: None,
) -> list[CheckResult]:
    """Run the checks, and return all their results in the order of the checks.

    Args:
        checks: pairs of name and check.
        timeout_s: deadline of all checks together, since they run at once.
        on_result: called with each result as soon as all results before it are known.
    """
    found: list[list[CheckResult]] = [[] for _ in checks]
    threads = []
    for (name, check), results in zip(checks, found, strict=True):
        # daemon: a check that hangs must not keep the process alive
        thread = threading.Thread(target=_run, args=(name, check, target, results), name=name, daemon=True)
        thread.start()
        threads.append(thread)
    deadline_s, all_results = time.monotonic() + timeout_s, []
    for (name, _), thread, results in zip(checks, threads, found, strict=True):
        thread.join(max(0.0, deadline_s - time.monotonic()))
        new = list(results)  # a copy: a check that hangs may still append
        if thread.is_alive():
            new.append(
                fail(
                    "check-timeout",
                    f"the check {name!r} did not end within {timeout_s:.0f} s",
                    "something that it needs hangs: a dead network file system, a GPU driver, a name server",
                )
            )
        all_results += new
        for result in new:
            on_result(result)
    return all_results


def _run(name: str, check: Check, target: Target, results: list[CheckResult]) -> None:
    try:
        for result in check(target):
            results.append(result)
    except (TbaError, OSError) as error:
        # the sentence of an error ends with what to do
        found, _, fix = str(error).rpartition("; ")
        results.append(fail(name, found or fix, fix if found else "correct what the message names"))
    except Exception as error:
        results.append(
            fail("check-error", f"the check {name!r} broke: {type(error).__name__}: {error}", "please report this")
        )
