"""Run the probes: all at once, each in a thread with a deadline, so that one that hangs hides nothing of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from tba.doctor.finding import Finding, fail
from tba.doctor.patient import Patient
from tba.doctor.probes import PROBES, Probe
from tba.errors import TbaError

PROBE_TIMEOUT_S = 60.0
"""Deadline of a probe; importing torch on a slow disk is the longest."""


def examine(
    patient: Patient,
    *,
    probes: Iterable[tuple[str, Probe]] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
    tell: Callable[[Finding], None] | None = None,
) -> list[Finding]:
    """What every probe finds, in the order of the probes.

    Args:
        probes: name and probe; default: all.
        timeout_s: deadline of all probes together, since they run at once.
        tell: is given each finding as soon as all before it are known.
    """
    chosen = list(PROBES.items() if probes is None else probes)
    results: list[list[Finding]] = [[] for _ in chosen]
    threads = []
    for index, (name, probe) in enumerate(chosen):
        # a probe that hangs must not keep the process alive
        thread = threading.Thread(target=_run, args=(name, probe, patient, results[index]), name=name, daemon=True)
        thread.start()
        threads.append(thread)
    deadline_s, findings = time.monotonic() + timeout_s, []
    for (name, _), thread, result in zip(chosen, threads, results, strict=True):
        thread.join(max(0.0, deadline_s - time.monotonic()))
        new = list(result)
        if thread.is_alive():
            new.append(
                fail(
                    "probe-deadline",
                    f"the probe {name!r} did not end within {timeout_s:.0f} s",
                    "what it looks at hangs: a dead network file system, a GPU driver, a name server; look there",
                )
            )
        findings += new
        if tell is not None:
            for finding in new:
                tell(finding)
    return findings


def _run(name: str, probe: Probe, patient: Patient, result: list[Finding]) -> None:
    try:
        for finding in probe(patient):
            result.append(finding)
    except (TbaError, OSError) as error:
        result.append(fail("probe-error", f"the probe {name!r} could not look: {error}", "mend what the sentence says"))
    except Exception as error:
        result.append(
            fail("probe-error", f"the probe {name!r} broke: {type(error).__name__}: {error}", "please report this")
        )
