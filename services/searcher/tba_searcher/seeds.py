"""Random streams of engines: two searchers, or one started twice, never sample the same completions."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket


def engine_seed(run_seed: int, searcher_id: str) -> int:
    """A seed in [0, 2^63) from the run's seed, the searcher's id and 16 fresh random bytes."""
    digest = hashlib.sha256(f"{run_seed}|{searcher_id}|".encode() + os.urandom(16)).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def new_searcher_id() -> str:
    """hostname-pid-random."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(3)}"
