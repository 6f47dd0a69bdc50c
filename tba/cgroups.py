"""Limits of the control groups (cgroups, version 1 or 2) of this process, and of the groups above them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
"""Where procfs and the cgroups are mounted."""


def memory_limits(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group that limits memory, and its limit in bytes."""
    # past "high" the kernel kills nobody, and lets the group crawl
    for folder, names in _groups("memory", ("memory.limit_in_bytes",), ("memory.max", "memory.high"), proc, cgroups):
        for name in names:
            with suppress(OSError, ValueError):  # no such group here; "max": no limit
                yield folder, int((folder / name).read_text(encoding="utf-8"))


def core_limits(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[float]:
    """Yield the number of cores, maybe not whole, of each group that limits them."""
    for folder, names in _groups("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",), proc, cgroups):
        with suppress(OSError, ValueError):
            quota_us, period_us = " ".join((folder / name).read_text(encoding="utf-8") for name in names).split()
            if int(quota_us) > 0:  # -1: no limit
                yield int(quota_us) / int(period_us)


def _groups(
    controller: str, old: tuple[str, ...], new: tuple[str, ...], proc: Path, cgroups: Path
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folder of each group, and the names of its files: `old` of version 1, `new` of version 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = cgroups / controller if controllers else cgroups
        folder = base / path.lstrip("/")
        # those above have limits, too; in a container only the own one may be there, as `base`
        for each in (folder, *folder.parents):
            if not each.is_relative_to(base):
                break
            yield each, old if controllers else new
