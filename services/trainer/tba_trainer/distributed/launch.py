"""`python -m tba_trainer.distributed.launch N --config FILE`: the trainer in N processes of this machine, by torchrun.

    python -m tba_trainer.distributed.launch N --nodes M --rendezvous HOST:PORT --config FILE   # on each of M machines

A worker's error sentence is the last line, and its exit code becomes this process's; torchrun alone would print a
traceback. SIGTERM is passed on to the workers, which have `local.stop_timeout_s` for their checkpoint; before there are
workers, it ends this process at once. The machines meet at HOST:PORT, where HOST is one of them, within
`trainer.collective_timeout_s`.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tba.early_signals import EXIT_STOPPED, quit_on_signals

LOOPBACK = "127.0.0.1"
LAUNCHER_VARIABLE = "TRAINER_LAUNCHER_PID"
"""Environment variable with the process id of the launcher. Names with the prefix TBA_ would be keys of the recipe."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that tell gloo and NCCL which network interface to use."""


def launch(
    num_processes: int,
    arguments: Sequence[str],
    *,
    stop_timeout_s: float,
    collective_timeout_s: float = 600.0,
    num_nodes: int = 1,
    rendezvous: str | None = None,
) -> int:
    """Run `python -m tba_trainer` with `arguments` in several processes and return the exit code.

    Args:
        num_processes: processes on this machine.
        arguments: command line of every process.
        stop_timeout_s: seconds that the processes have after SIGTERM.
        collective_timeout_s: seconds that the machines wait for each other at the start.
        num_nodes: machines; this is called on each of them.
        rendezvous: HOST:PORT where several machines meet; one of them must be HOST.

    Returns:
        0; or the code of the worker that failed first, 1 if a signal killed it; or 2 if the machines did not meet or
        lost each other; or 128 + the number of the signal that this process got.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    from tba.service_main import EXIT_ERROR

    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    wait_s = math.ceil(collective_timeout_s)
    if rendezvous is None:
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, "lo")  # all processes are on this machine
        meeting = ["--standalone", f"--local-addr={LOOPBACK}"]
    else:
        meeting = [f"--nnodes={num_nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", "--rdzv-id=tba"]
        meeting.append(f"--rdzv-conf=join_timeout={wait_s},read_timeout={wait_s}")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the workers report errors
    options = [*meeting, f"--nproc-per-node={num_processes}", f"--shutdown-timeout={math.ceil(stop_timeout_s)}"]
    try:
        run(parse_args([*options, "-m", "tba_trainer", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        _say(
            f"process {rank} was ended by {signal.Signals(-failure.exitcode).name}. Where nobody killed it: a machine "
            "without free memory ends a process by SIGKILL, and NCCL ends its own by SIGABRT when another has not "
            "answered for trainer.collective_timeout_s"
        )
        return 1
    except (RendezvousError, DistError) as error:  # the second between the meeting and the start of processes
        if rendezvous is None:
            raise
        _say(
            f"the launchers of {num_nodes} machines did not meet at {rendezvous} within {wait_s} s "
            f"(trainer.collective_timeout_s), or lost each other ({error}); start all of them again, the trainer "
            "continues from the last checkpoint"
        )
        return EXIT_ERROR
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _say(sentence: str) -> None:
    print(f"error: trainer: {sentence}", file=sys.stderr, flush=True)


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
    """Run the command line, and return the exit code of the trainer."""
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
        recipe = load_recipe(args.config)
        return launch(
            args.num_processes,
            ["--config", args.config, *others],
            stop_timeout_s=recipe.local.stop_timeout_s,
            collective_timeout_s=recipe.trainer.collective_timeout_s,
            num_nodes=args.nodes,
            rendezvous=args.rendezvous,
        )
    except ConfigError as error:
        _say(str(error))
        return EXIT_ERROR


if __name__ == "__main__":
    quit_on_signals("trainer", code=EXIT_STOPPED)  # torchrun has handlers of its own once there are workers
    sys.exit(main())
