"""CPU seconds of the processes of a local run, read from /proc."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MODULE = re.compile(r"-m tba_(buffer|reward|searcher|trainer)\b")


def cpu_seconds(root_pid: int) -> dict[str, float]:
    """Return CPU seconds (user and system) since their start, by kind of process, of a process and all below it.

    The descendants of a service count with it, and those that have ended count with the parent that waited for them.
    `other` is the supervisor with everything that is no service.
    """
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # after the name, which may contain anything: state, parent, ..., utime, stime, cutime, cstime
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(folder.name)
        parents[pid], seconds[pid] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS_PER_S
    children: dict[int, list[int]] = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    total: dict[str, float] = defaultdict(float)
    todo = [(root_pid, "other")]
    while todo:
        pid, kind = todo.pop()
        kind = _kind(pid) if kind == "other" else kind
        total[kind] += seconds.get(pid, 0.0)
        todo += [(child, kind) for child in children[pid]]
    return dict(total)


def _kind(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "other"
    if (found := _MODULE.search(command)) is not None:
        return found[1]
    return "redis" if "redis-server" in command else "other"
