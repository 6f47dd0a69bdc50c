"""The TCP ports on which a process listens, as the kernel says."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def listening_ports(pid: int) -> list[int]:
    """Return the ports on which the process itself listens, not its children."""
    inodes: set[str] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(link)
            if name.startswith("socket:["):
                inodes.add(name[8:-1])
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and fields[9] in inodes:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)
