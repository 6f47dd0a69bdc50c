"""Settings and checks for every test."""

import gc
import os
import resource
import signal
import subprocess
import sys
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


def busy_s() -> float:
    """Return the CPU seconds that all processes of this machine have taken; the steal of a host is busy too."""
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


begun_s, begun_busy_s = time.monotonic(), busy_s()
seconds_of_files: defaultdict[str, float] = defaultdict(float)
NUM_SLOWEST = 10
MAX_MINUTES = float(os.environ.get("TEST_MINUTES") or "inf")
"""A run that takes longer fails, on a quiet machine of two cores or more; `make test` sets it."""
LOOP = "import time; t = time.perf_counter(); sum(i * i for i in range(20_000_000)); print(time.perf_counter() - t)"
LOOP_S = 1.1
"""What the slower of two such loops at once took on two quiet cores of an AMD EPYC: 0.97 to 1.26 s, 2026-11-30."""
MAX_SHARE_OF_OTHERS = 0.1
"""Share of the CPUs that other processes may take on a quiet machine."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what each file takes, in whatever process it runs."""
    seconds_of_files[report.nodeid.partition("::")[0]] += report.duration


def share_of_others() -> float:
    """Return the share of the CPUs that processes took which this run did not start."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return (busy_s() - begun_busy_s - own_s) / (time.monotonic() - begun_s) / (os.cpu_count() or 1)


def slowness() -> float:
    """Return how many times as long as LOOP_S two loops at once take here, at least 1."""
    command = [sys.executable, "-c", LOOP]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return max(1.0, max(float(loop.communicate()[0]) for loop in loops) / LOOP_S)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long all of it took, and which files took the most; fail where that is too long for this machine."""
    minutes = (time.monotonic() - begun_s) / 60
    if minutes > MAX_MINUTES:
        share, slow = share_of_others(), slowness()
        terminalreporter.section(
            f"above {MAX_MINUTES:g} minutes; others took {share:.0%} of the CPUs, {slow:.1f} x slow"
        )
        is_quiet = share < MAX_SHARE_OF_OTHERS and (os.cpu_count() or 1) >= 2
        if is_quiet and minutes > MAX_MINUTES * slow:
            terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED  # pyright: ignore
    if len(seconds_of_files) > NUM_SLOWEST:
        terminalreporter.section(f"{minutes:.1f} minutes; the slowest files")
        for seconds, name in sorted(((s, name) for name, s in seconds_of_files.items()), reverse=True)[:NUM_SLOWEST]:
            terminalreporter.write_line(f"{seconds:7.1f} s {name}")
