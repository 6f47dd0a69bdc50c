"""Entry point of `tba`: parse the flags, import the one command that is asked for, explain every error in a sentence.

Exit codes: 0 done, 1 the run failed or a check found a violation, 2 an explained error, 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from tba.cli.parser import build_parser
from tba.errors import ChildError, TbaError

EXIT_FAILED = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words after `tba`; default: those of this process.
    """
    args = build_parser().parse_args(argv)
    from tba.logs import silence_retries  # after the flags: --help stays quick

    silence_retries()
    module_name, _, function_name = args.command.partition(":")
    try:
        command = getattr(importlib.import_module(module_name), function_name)
        return command(args)
    except TbaError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED if isinstance(error, ChildError) else EXIT_ERROR
    except BrokenPipeError:
        # the reader of a pipe (`tba table ... | head`) went away; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if args.debug:
            raise
        print(f"error: {error.strerror or error}: {error.filename or args.command}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
