"""The heartbeat: what a component is, which weights it holds, what it does and what it waits for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tba.errors import MalformedError
from tba.versions import PolicyVersion
from tba.wire.codec import Reader, pack, unpack

SCHEMA = 1
KINDS = ("searcher", "trainer", "reward", "launcher")
MAX_GAUGES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait has a name and a deadline. Seconds count from when the heartbeat was made: clocks may differ."""

    name: str
    for_s: float
    deadline_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One sign of life."""

    component_id: str
    kind: str
    run: str
    state: str
    version: PolicyVersion | None
    wait: Wait | None
    gauges: Mapping[str, float] = field(default_factory=dict)


def encode_heartbeat(beat: Heartbeat) -> bytes:
    """msgpack bytes of one heartbeat."""
    return pack(
        {
            "schema": SCHEMA,
            "component_id": beat.component_id,
            "kind": beat.kind,
            "run": beat.run,
            "state": beat.state,
            "version": None if beat.version is None else str(beat.version),
            "wait": None
            if beat.wait is None
            else {
                "name": beat.wait.name,
                "for_s": float(beat.wait.for_s),
                "deadline_in_s": float(beat.wait.deadline_in_s),
            },
            # a gauge that is not finite is unknown
            "gauges": {name: float(value) for name, value in beat.gauges.items() if math.isfinite(value)},
        }
    )


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Decode and validate one heartbeat.

    Raises:
        MalformedError, SchemaVersionError, LimitError
    """
    fields = Reader(unpack(data, what="heartbeat", max_bytes=64 * 1024), what="heartbeat")
    fields.schema(SCHEMA)
    version, wait = fields.optional("version", str), fields.optional("wait", dict)
    gauges = fields.take("gauges", dict)
    if len(gauges) > MAX_GAUGES or not all(isinstance(v, float) and math.isfinite(v) for v in gauges.values()):
        raise MalformedError(f"heartbeat: gauges must be at most {MAX_GAUGES} names with finite float values")
    beat = Heartbeat(
        component_id=fields.name("component_id"),
        kind=fields.choice("kind", KINDS),
        run=fields.name("run"),
        state=fields.name("state"),
        version=None if version is None else PolicyVersion.parse(version),
        wait=None if wait is None else _wait(Reader(wait, what="heartbeat wait")),
        gauges=gauges,
    )
    fields.done()
    return beat


def _wait(fields: Reader) -> Wait:
    wait = Wait(name=fields.name("name"), for_s=fields.number("for_s"), deadline_in_s=fields.number("deadline_in_s"))
    fields.done()
    return wait
