"""Settings and checks for every test."""

import gc
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

# what a test starts runs the working tree, whatever is installed, with one thread
ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, *sorted((ROOT / "services").iterdir())]))
os.environ["OMP_NUM_THREADS"] = "1"

# importing torch and all tests makes objects that stay: to look for garbage among them takes a third of the collection
gc.disable()

# no test depends on how fast the machine is, and two runs of the same code see the same examples; new ones are searched
# for by `pytest --hypothesis-profile=search`
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", deadline=None)
settings.load_profile("any machine")

# a shell starts what it puts in the background with Ctrl-C ignored, and what the tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def the_process_is_left_as_it_was() -> Iterator[None]:
    """Fail a test that leaves logs bound to its own captured stderr, or signal handlers: later tests pay."""
    watched = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in watched]
    factory = structlog.get_config()["logger_factory"]
    yield
    assert structlog.get_config()["logger_factory"] is factory, "this test has configured logging for all later ones"
    assert [signal.getsignal(number) for number in watched] == before, "this test has left a signal handler"


def pytest_collection_finish() -> None:
    """Collect garbage again from here on, of what the tests make alone."""
    gc.enable()
    gc.freeze()


begun_s = time.monotonic()
seconds_of_files: defaultdict[str, float] = defaultdict(float)
NUM_SLOWEST = 10


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what each file takes, in whatever process it runs."""
    seconds_of_files[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long all of it took, and which files took the most."""
    if len(seconds_of_files) > NUM_SLOWEST:
        terminalreporter.section(f"{(time.monotonic() - begun_s) / 60:.1f} minutes; the slowest files")
        for seconds, name in sorted(((s, name) for name, s in seconds_of_files.items()), reverse=True)[:NUM_SLOWEST]:
            terminalreporter.write_line(f"{seconds:7.1f} s {name}")
