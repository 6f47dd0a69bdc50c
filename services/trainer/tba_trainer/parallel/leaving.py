"""How a process of a team ends: at once, when its work is done, without the interpreter's teardown.

Threads of gloo and NCCL may outlive `destroy_process_group` (a device mesh still holds the group), and one that wakes
during the teardown aborts the process ("terminate called without an active exception", exit code -6): a finished
trainer would count as failed.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def num_processes() -> int:
    """How many processes torchrun has started for this trainer; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave(code: int) -> NoReturn:
    """End this process with an exit code; in a team without teardown. Everything must be closed and joined before.

    Raises:
        SystemExit: in a trainer of one process, as usual.
    """
    if num_processes() == 1:
        raise SystemExit(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
