"""How this process asks the system for memory."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MAX_KEPT_BYTES = 256 * 2**20
MAX_HEAP_BLOCK_BYTES = 32 * 2**20


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next request (up to MAX_KEPT_BYTES) instead of giving it back.

    Every request allocates and frees blocks of some 100 KB to some MB. By default each of them is mapped, cleared page
    by page at first touch, and unmapped again; that costs more than all the work on them (docs/adr/0005-msgspec.md).
    Elsewhere than under glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)
    mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
