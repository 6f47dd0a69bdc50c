"""`python -m tba_trainer.parallel.launch N --config FILE`: the trainer in N processes of this machine, by torchrun.

torchrun would end with a traceback of its own whenever a worker ends with an error; here the worker's own sentence is
the last word, and its exit code is this process's. SIGTERM goes on to the workers, who have `local.stop_timeout_s` for
their checkpoint. On several machines torchrun itself is used (docs/trainer.md).
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from tba.config import load_recipe

LOOPBACK = "127.0.0.1"


def launch(num_processes: int, arguments: Sequence[str], *, stop_timeout_s: float) -> int:
    """Run `python -m tba_trainer` with `arguments` in several processes; returns the exit code.

    Returns:
        0; or the code of the worker that failed first, 1 if a signal killed it; or 128 + number of the signal that this
        process got.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # all are on this machine
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the workers say what happened
    options = [
        "--standalone",
        f"--local-addr={LOOPBACK}",
        f"--nproc-per-node={num_processes}",
        f"--shutdown-timeout={math.ceil(stop_timeout_s)}",
    ]
    try:
        run(parse_args([*options, "-m", "tba_trainer", *arguments]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    recipe_path = sys.argv[sys.argv.index("--config") + 1]
    stop_timeout_s = load_recipe(recipe_path).local.stop_timeout_s
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:], stop_timeout_s=stop_timeout_s))
