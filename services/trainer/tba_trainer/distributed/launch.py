"""`python -m tba_trainer.distributed.launch N --config FILE`: the trainer in N processes of this machine, by torchrun.

    python -m tba_trainer.distributed.launch N --nodes M --rendezvous HOST:PORT --config FILE   # on each of M machines

A worker's error sentence is the last line, and its exit code becomes this process's; torchrun alone would print a
traceback. SIGTERM is passed on to the workers, which have `local.stop_timeout_s` for their checkpoint; before there are
any, it ends this process at once. The machines meet at HOST:PORT, which is one of them.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tba.early_signals import EXIT_STOPPED, quit_on_signals

LOOPBACK = "127.0.0.1"


def launch(
    num_processes: int,
    arguments: Sequence[str],
    *,
    stop_timeout_s: float,
    num_nodes: int = 1,
    rendezvous: str | None = None,
    module: str = "tba_trainer",
) -> int:
    """Run `python -m MODULE` with `arguments` in several processes and return the exit code.

    Args:
        num_processes: on this machine.
        arguments: of every process.
        stop_timeout_s: seconds that the processes have after SIGTERM.
        num_nodes: machines; this is called on each of them.
        rendezvous: HOST:PORT where several machines meet; one of them must be HOST.
        module: the program of every process.

    Returns:
        0; or the code of the worker that failed first, 1 if a signal killed it; or 128 + the number of the signal that
        this process got.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if rendezvous is None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # all processes are on this machine
        meeting = ["--standalone", f"--local-addr={LOOPBACK}"]
    else:
        meeting = [f"--nnodes={num_nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", "--rdzv-id=tba"]
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the workers report errors
    options = [
        *meeting,
        f"--nproc-per-node={num_processes}",
        f"--shutdown-timeout={math.ceil(stop_timeout_s)}",
    ]
    try:
        run(parse_args([*options, "-m", module, *arguments]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def exit_process(code: int) -> NoReturn:
    """End this process with an exit code; in a team, without the interpreter's teardown.

    Everything must be closed and joined before.

    Raises:
        SystemExit: in a trainer of one process, as usual.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":  # set by torchrun; process_group.py reads it too, but imports torch
        raise SystemExit(code)
    # Threads of gloo and NCCL may outlive `destroy_process_group` (a device mesh still holds the group). One that wakes
    # during the teardown aborts the process ("terminate called without an active exception", exit code -6), and a
    # finished trainer would count as failed.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the trainer."""
    parser = argparse.ArgumentParser(prog="python -m tba_trainer.distributed.launch", allow_abbrev=False)
    parser.add_argument("num_processes", type=int, metavar="N", help="processes on this machine")
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="machines that start this")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where several machines meet")
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe (TOML) or resolved config (JSON)")
    args, others = parser.parse_known_args(argv)
    if (args.nodes > 1) != (args.rendezvous is not None):
        parser.error("--nodes and --rendezvous go together: several machines need an address where they meet")
    from tba.config import load_recipe
    from tba.errors import ConfigError
    from tba.service_main import EXIT_ERROR

    try:
        stop_timeout_s = load_recipe(args.config).local.stop_timeout_s
    except ConfigError as error:
        print(f"error: trainer: {error}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    return launch(
        args.num_processes,
        ["--config", args.config, *others],
        stop_timeout_s=stop_timeout_s,
        num_nodes=args.nodes,
        rendezvous=args.rendezvous,
    )


if __name__ == "__main__":
    quit_on_signals("trainer", code=EXIT_STOPPED)  # torchrun has handlers of its own once there are workers
    sys.exit(main())
