"""The heartbeat: the kind of a component, its weights, its state, and its current wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tba.errors import LimitError, MalformedError
from tba.fields import MAX_NUMBER, control_character_error, is_bounded
from tba.versions import PolicyVersion
from tba.wire.codec import MAX_NAME_CHARS, Document, Name, pack, unpack

SCHEMA = 1
MAX_HEARTBEAT_BYTES = 4 * 1024
MAX_TRAINER_BYTES = 16 * 1024
"""Limit for a trainer, whose gauges include its metrics."""
MAX_GAUGES = 256

STARTED_AT_S = "started_at_s"
"""Name of a trainer's gauge: start time of its process, Unix seconds."""
WAITED_S = "waited_s:"
"""Prefix of a trainer's gauges; the name of a wait follows. Value: seconds that its process has spent in the wait."""

Kind = Literal["searcher", "trainer", "reward", "launcher"]


class Wait(Document, frozen=True, kw_only=True):
    """A named wait with a deadline. Its seconds count from the moment of the heartbeat, because clocks may differ."""

    name: Name
    for_s: float
    deadline_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The state of a component at one moment, sent every few seconds."""

    component_id: str
    kind: str
    run: str
    state: str
    version: PolicyVersion | None
    wait: Wait | None
    gauges: Mapping[str, float] = field(default_factory=dict)


def encode_heartbeat(beat: Heartbeat) -> bytes:
    """Encode one heartbeat as msgpack."""
    return pack(
        {
            "schema": SCHEMA,
            "component_id": beat.component_id,
            "kind": beat.kind,
            "run": beat.run,
            "state": beat.state,
            "version": None if beat.version is None else str(beat.version),
            "wait": beat.wait,
            # an unbounded or NaN gauge is unknown, and one must not cost the heartbeat
            "gauges": {name: float(value) for name, value in beat.gauges.items() if is_bounded(value)},
        }
    )


class _HeartbeatDocument(Document, frozen=True):
    schema: Literal[1]
    component_id: Name
    kind: Kind
    run: Name
    state: Name
    version: str | None
    wait: Wait | None
    gauges: Annotated[dict[str, float], Meta(max_length=MAX_GAUGES)]


_DECODER = msgspec.msgpack.Decoder(_HeartbeatDocument)


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Decode and validate one heartbeat.

    Raises:
        MalformedError, SchemaVersionError, LimitError
    """
    document = unpack(data, _DECODER, what="heartbeat", schema=SCHEMA, max_bytes=MAX_TRAINER_BYTES)
    # the kind is known only now: until here the larger limit held
    if document.kind != "trainer" and len(data) > MAX_HEARTBEAT_BYTES:
        raise LimitError(
            f"heartbeat: {len(data)} bytes exceed the limit of {MAX_HEARTBEAT_BYTES} of a {document.kind}; "
            "send fewer gauges, with shorter names"
        )
    wait = document.wait
    texts = {"component_id": document.component_id, "state": document.state, "gauges": "".join(document.gauges)}
    if wait is not None:
        texts["wait.name"] = wait.name
    # these texts become labels of metrics and lines of logs
    for name, text in texts.items():
        if problem := control_character_error(text):
            raise MalformedError(f"heartbeat: field {name!r} {problem} (value {text[:MAX_NAME_CHARS]!r})")
    numbers = {f"gauges.{name}": value for name, value in document.gauges.items()}
    if wait is not None:
        numbers |= {"wait.for_s": wait.for_s, "wait.deadline_in_s": wait.deadline_in_s}
    # msgpack holds any float, and gauges are summed up
    for name, value in numbers.items():
        if not is_bounded(value):
            raise MalformedError(f"heartbeat: field {name!r} is {value}, not a number of at most {MAX_NUMBER:g}")
    return Heartbeat(
        component_id=document.component_id,
        kind=document.kind,
        run=document.run,
        state=document.state,
        version=None if document.version is None else PolicyVersion.parse(document.version),
        wait=wait,
        gauges=document.gauges,
    )
