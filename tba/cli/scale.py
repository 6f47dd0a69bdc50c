"""`tba scale`: start or stop searchers of a run while it goes on, or show how many there are and who asked for them."""

from __future__ import annotations

import argparse
import time

from tba.api import ScaleAudit, ScaleRequest, ScalingInfo, SearchersInfo
from tba.cli.target import open_client
from tba.clients import BufferClient
from tba.errors import ConfigError, UnavailableError, WaitTimeoutError
from tba.plain_text import shown

AS_RECIPE = "recipe"
POLL_S = 0.5
SOURCES = {
    "operator": "asked for by the operator",
    "recipe": "as the recipe says",
    "deployment": "as the Deployment says",
    "run-over": "the run is over",
}


def scale_command(args: argparse.Namespace) -> int:
    """Change the number of searchers, or show it."""
    num = _number(args.number)
    client = open_client(args)
    try:
        if args.number is None:
            info = whole_scaling(client)
        else:
            info = client.scale(ScaleRequest(num_searchers=num, reason=args.reason))
            if args.wait:
                info = until_there(client, info, timeout_s=args.timeout_s)
    finally:
        client.close()
    print(info.model_dump_json(indent=2) if args.json else "\n".join(map(shown, scaling_lines(info))))
    return 0


def whole_scaling(client: BufferClient) -> ScalingInfo:
    """How many searchers there are, with every change."""
    info = client.scaling()
    changes = list(info.changes)
    while info.next is not None:
        info = client.scaling(after=info.next)
        changes += info.changes
    return info.model_copy(update={"changes": changes})


def until_there(client: BufferClient, info: ScalingInfo, *, timeout_s: float) -> ScalingInfo:
    """Wait until as many searchers are alive as are wanted.

    Raises:
        WaitTimeoutError: they are not, after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    after = max(0, info.searchers.revision - 1)
    while info.searchers.wanted is None or info.searchers.alive != info.searchers.wanted:
        if time.monotonic() > deadline_s:
            raise WaitTimeoutError(
                f"wait 'searchers': {info.searchers.alive} of {info.searchers.wanted} searchers are alive after "
                f"{timeout_s:g} s{f' ({info.searchers.note})' if info.searchers.note else ''}; look at their logs, or "
                "wait longer with --timeout-s"
            )
        time.sleep(POLL_S)
        try:
            info = client.scaling(after=after)
        except UnavailableError:
            continue
    return info


def scaling_lines(info: ScalingInfo) -> list[str]:
    """The searchers as people read them, and a line for each change."""
    return [searchers_line(info.searchers), *(_change_line(change) for change in info.changes)]


def searchers_line(searchers: SearchersInfo) -> str:
    """How many are wanted and alive, in one line."""
    wanted = "" if searchers.wanted is None else f"{searchers.wanted} wanted ({SOURCES[str(searchers.source)]}), "
    note = f"; {searchers.note}" if searchers.note else ""
    return f"searchers: {wanted}{searchers.alive} alive, scaled by {searchers.backend}{note}"


def _change_line(change: ScaleAudit) -> str:
    old, new = (AS_RECIPE if num is None else str(num) for num in (change.old, change.new))
    reason = f" ({change.reason})" if change.reason else ""
    reached = "not there so far" if change.reached is None else f"there from step {change.reached.step} on"
    return (
        f"revision {change.revision}, by the {change.role} after step {change.step}: {old} -> {new}{reason}; {reached}"
    )


def _number(text: str | None) -> int | None:
    """The number that was asked for; None: that of the recipe.

    Raises:
        ConfigError: it is neither.
    """
    if text is None or text == AS_RECIPE:
        return None
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{text!r} is neither a number of searchers nor the word recipe; for example: tba scale 4")
    return int(text)
