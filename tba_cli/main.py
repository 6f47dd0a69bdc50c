"""Entry point of `tba`: parse the flags, import the chosen command, explain every error in a sentence.

Exit codes: 0 done, 1 the run failed or a check found a violation, 2 an explained error, 130 Ctrl-C.

Only the standard library is imported before Ctrl-C is handled.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from tba.early_signals import open_streams

EXIT_FAILED = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
LAUNCHER = "tba_cli.local"
"""The package that starts whole runs on one machine; images are made without it (.dockerignore)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    open_streams()
    with _quit_on_interrupt():
        from tba_cli.parser import parse_arguments

        args = parse_arguments(argv)
        # only now, so that --help stays quick
        from tba.errors import ChildError, TbaError
        from tba.logs import logs_on_stderr, silence_retries
        from tba.tls import with_bare_urls

        silence_retries()
        module_name, _, function_name = args.command.partition(":")
        try:
            command = getattr(importlib.import_module(module_name), function_name)
        except ModuleNotFoundError as error:
            return _no_launcher(error)
    try:
        with logs_on_stderr():
            return command(args)
    except ModuleNotFoundError as error:  # some commands import the launcher only where they need it
        return _no_launcher(error)
    except TbaError as error:
        if args.debug:
            raise
        print(f"error: {with_bare_urls(str(error))}", file=sys.stderr, flush=True)
        return EXIT_FAILED if isinstance(error, ChildError) else EXIT_ERROR
    except BrokenPipeError:
        # the reader of a pipe (`tba table ... | head`) is gone: without this, the flush at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if args.debug:
            raise
        import tempfile

        from tba.store.file import explain_full_disk

        what = explain_full_disk(error, os.getcwd(), tempfile.gettempdir())
        what = what or f"{error.strerror or error}: {error.filename or args.command}"
        print(f"error: {what}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


def _no_launcher(error: ModuleNotFoundError) -> int:
    """Print that this image holds no launcher; raise the error if another module is missing."""
    if not (error.name or "").startswith(LAUNCHER):
        raise error
    print("error: this image holds no launcher; run this command where tba is installed", file=sys.stderr)
    return EXIT_ERROR


@contextmanager
def _quit_on_interrupt() -> Iterator[None]:
    """Make Ctrl-C in the `with` block end the process at once, with one line; a caller's own SIGINT handler stays."""

    # during an import, KeyboardInterrupt would become a traceback or be swallowed; nothing else is safe there
    def quit_at_once(_number: int, _frame: FrameType | None) -> None:
        os.write(2, b"interrupted\n")
        os._exit(EXIT_INTERRUPTED)

    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, quit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
