"""Run checks one after another, each in a process of its own with a deadline; one JSON line each, written at once; and
the report that is made of them.

The process is forked from one that has imported torch and transformers, and has touched no device: an import takes
seconds on a busy machine, a fork none.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench.check import Bench, Check, Findings, Skipped

LAST_LINES = 60
"""Of a check's output that the JSON line keeps where it has not passed."""
REPORTED_LINES = 12
"""Of them, those that the report has."""
_EXIT_SKIPPED, _EXIT_RAISED = 3, 4
_MOST_THREADS = 8
STOPPED = "stopped"
_STATUS = {0: "passed", _EXIT_SKIPPED: "skipped"}


def preload() -> None:
    """Import what nearly every check needs. Nothing here may touch the device: a forked process could not use it."""
    import torch.nn.attention.varlen  # noqa: F401
    import transformers  # noqa: F401
    from tba_trainer.learner import learner  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401


def run_checks(
    checks: Sequence[Check], bench: Bench, *, json_path: Path | None, minutes: float | None
) -> Iterator[dict[str, Any]]:
    """Yield one result after another.

    Args:
        bench: its folder gets one folder for each check.
        json_path: every result is appended to it.
        minutes: after these no further check is started; None: all are.
    """
    start = time.monotonic()
    preload()
    for check in checks:
        if minutes is not None and time.monotonic() - start > 60 * minutes:
            result = _result(check, "not started", Findings(), seconds=0.0, output=f"--minutes {minutes:g} are over")
        else:
            result = _run(check, bench)
        if json_path is not None:
            with json_path.open("a") as file:
                file.write(json.dumps(result) + "\n")
        yield result
        if result["status"] == STOPPED:
            return


def _run(check: Check, bench: Bench) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"{check.name}-", dir=bench.folder))
    log, found_path = folder / "output.log", folder / "found.json"
    own = Bench(device=bench.device, kind=bench.kind, folder=folder)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(check, own, found_path, log))
    start = time.monotonic()
    process.start()
    is_stopped = False
    try:
        process.join(check.deadline_s)
    except (SystemExit, KeyboardInterrupt):  # `timeout`, an operator: what was found is told all the same
        is_stopped = True
    is_late = process.is_alive()
    if process.pid is not None and is_late:
        os.killpg(process.pid, signal.SIGKILL)  # its own group: what it has started ends with it
        process.join()
    seconds = time.monotonic() - start
    found = Findings(**(json.loads(found_path.read_text()) if found_path.is_file() else {}))
    status = STOPPED if is_stopped else "timed out" if is_late else _STATUS.get(process.exitcode or 0, "crashed")
    if status == "passed" and found.failures:
        status = "failed"
    output = "" if status == "passed" else "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    if status == "crashed" and process.exitcode != _EXIT_RAISED:
        output += f"\nexit code {process.exitcode}"
    return _result(check, status, found, seconds=seconds, output=output)


def _child(check: Check, bench: Bench, found_path: Path, log: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for stream in (1, 2):  # what native code and other programs write
        os.dup2(sys.stdout.fileno(), stream)
    if bench.device == "cuda":
        import torch

        torch.set_num_threads(min(_MOST_THREADS, os.cpu_count() or 1))  # for what a check compares with on the CPU
    code = run_one(check, bench, Findings(path=found_path))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of CUDA, NCCL or an engine must not keep it


def run_one(check: Check, bench: Bench, found: Findings) -> int:
    """Run a check in this process; return its exit code, with a reason or a traceback on stderr."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        check.run(bench, found)
    except Skipped as reason:
        print(reason, file=sys.stderr)
        return _EXIT_SKIPPED
    except BaseException:  # SystemExit of a parser too
        traceback.print_exc()
        return _EXIT_RAISED
    return 0


def _result(check: Check, status: str, found: Findings, *, seconds: float, output: str) -> dict[str, Any]:
    return {
        "name": check.name,
        "part": check.part,
        "about": check.about,
        "status": status,
        "seconds": round(seconds, 1),
        "values": found.values,
        "failures": found.failures,
        "output": output,
    }


def line_of(result: dict[str, Any]) -> str:
    """Return one result for a terminal."""
    values = ", ".join(f"{name} {value}" for name, value in result["values"].items())
    text = f"{result['name']:<14}{result['status']:<10}{result['seconds']:>7.1f} s  {values}"
    return "\n".join([text, *(f"    {problem}" for problem in result["failures"]), *result["output"].splitlines()])


def report_text(results: Sequence[dict[str, Any]], *, title: str, command: str) -> str:
    """Return the report: a table of all checks, the numbers of each, and in full what did not pass."""
    passed = sum(result["status"] == "passed" for result in results)
    lines = [f"# {title}", "", f"`{command}`: {passed} of {len(results)} checks passed.", ""]
    lines += ["| check | part | result | s | question |", "|---|---|---|---|---|"]
    lines += [
        f"| {each['name']} | {each['part']} | {each['status']} | {each['seconds']} | {each['about']} |"
        for each in results
    ]
    for result in results:
        lines += ["", f"## {result['name']}: {result['status']}", ""]
        lines += [f"* **{failure}**" for failure in result["failures"]]
        lines += [""] if result["failures"] else []
        if result["values"]:
            lines += ["| number | value |", "|---|---|"]
            values = ((name, str(value).replace("|", "/")) for name, value in result["values"].items())
            lines += [f"| {name} | {value} |" for name, value in values]
        if result["output"]:
            lines += ["", "```", *result["output"].splitlines()[-REPORTED_LINES:], "```"]
    return "\n".join(lines) + "\n"
