"""The clocks of the services, of Redis and of the object store, beside that of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Literal

from tba.doctor.finding import Finding, fail, ok, warn
from tba.doctor.patient import Answer, Patient, http_get
from tba.doctor.resp import RespError, open_redis

WARN_S = 2.0
FAIL_S = 60.0
"""S3 refuses requests that are 15 minutes off, leases and heartbeats suffer long before."""
MEND = "let an NTP client (chrony, systemd-timesyncd) set the clock of both machines"


def probe_clocks(patient: Patient) -> Iterator[Finding]:
    """One finding for each clock that can be read."""
    services: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
    for service in services:
        answer = patient.ask(service, "/livez")
        if isinstance(answer, Answer):
            yield from _of_date(f"the {service} service", answer)
    if not patient.is_local or patient.is_going:
        try:
            with open_redis(patient.recipe) as redis:
                before_s = time.time()
                theirs_s = redis.time_s()
                yield judge("Redis", theirs_s - (before_s + time.time()) / 2, unsure_s=(time.time() - before_s) / 2)
        except RespError:
            pass  # the probe of Redis says why
    store = patient.recipe.store
    if store.url.startswith("s3://"):
        endpoint = store.endpoint_url or f"https://s3.{store.region}.amazonaws.com"
        answer = http_get(f"{endpoint.rstrip('/')}/", ca_file=store.ca_file)
        if isinstance(answer, Answer):
            yield from _of_date("the object store", answer)


def _of_date(who: str, answer: Answer) -> Iterator[Finding]:
    """From the Date header, which counts whole seconds."""
    try:
        theirs_s = parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5
    except (KeyError, ValueError, TypeError):
        return
    yield judge(who, theirs_s - (answer.asked_at_s + answer.took_s / 2), unsure_s=0.5 + answer.took_s / 2)


def judge(who: str, ahead_s: float, *, unsure_s: float) -> Finding:
    """A clock that is ahead of ours by so many seconds, give or take `unsure_s`."""
    off_s = max(0.0, abs(ahead_s) - unsure_s)
    way = "ahead of" if ahead_s > 0 else "behind"
    if off_s < WARN_S:
        return ok("clock", f"the clock of {who} agrees with ours, within {max(abs(ahead_s), unsure_s):.1f} s")
    text = f"the clock of {who} is {abs(ahead_s):.0f} s {way} ours"
    return fail("clock", text, MEND) if off_s >= FAIL_S else warn("clock", text, MEND)
