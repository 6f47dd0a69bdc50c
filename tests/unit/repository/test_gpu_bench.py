"""benchmarks/gpu.py: the whole smoke command on the CPU, and what becomes of checks that hang, fail or crash."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.gpu_bench.check import Bench, Check, Findings, Skipped
from benchmarks.gpu_bench.checks import CHECKS
from benchmarks.gpu_bench.runner import report_text, run_checks

SKIPPED_ON_A_CPU = {"vllm", "run", "run_vllm"}


@pytest.mark.nightly
def test_the_smoke_command_passes_on_a_cpu(tmp_path: Path) -> None:
    lines, report = tmp_path / "lines.jsonl", tmp_path / "report.md"
    command = [sys.executable, "benchmarks/gpu.py", "smoke", "--device", "cpu"]
    done = subprocess.run([*command, "--json", str(lines), "--report", str(report)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [result["name"] for result in results] == [check.name for check in CHECKS if "smoke" in check.kinds]
    assert {result["name"] for result in results if result["status"] == "skipped"} == SKIPPED_ON_A_CPU
    assert all(result["status"] == "passed" for result in results if result["name"] not in SKIPPED_ON_A_CPU)
    assert all(result["values"] for result in results if result["status"] == "passed")
    assert report.read_text().count("| passed |") == len(results) - len(SKIPPED_ON_A_CPU)


def _hang(bench: Bench, found: Findings) -> None:
    found.note("before", 1.0)
    time.sleep(60)


def _fail(bench: Bench, found: Findings) -> None:
    found.at_most("small", 1.0, 2.0)
    found.at_most("large", 3.0, 2.0)
    found.at_most("unknown", float("nan"), 2.0)
    with found.part("first"):
        raise ValueError("a part")
    found.note("after", 1)


def _crash(bench: Bench, found: Findings) -> None:
    raise RuntimeError("all of it")


def _skip(bench: Bench, found: Findings) -> None:
    raise Skipped("no card")


def test_every_end_of_a_check_is_told_with_what_it_had_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made")
    functions = {"timed out": _hang, "failed": _fail, "crashed": _crash, "skipped": _skip}
    for function in functions.values():
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_bench.made", module)
    checks = [
        Check(name=name, part="run", about="", function=f"made.{made.__name__}", deadline_s=3 if made is _hang else 60)
        for name, made in functions.items()
    ]
    bench = Bench(device="cpu", kind="smoke", folder=tmp_path)
    path = tmp_path / "lines.jsonl"
    results = {result["name"]: result for result in run_checks(checks, bench, json_path=path, minutes=None)}
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(results.values())
    assert {name: result["status"] for name, result in results.items()} == {name: name for name in functions}
    assert results["timed out"]["values"] == {"before": 1.0}
    assert results["failed"]["values"].keys() == {"small", "large", "unknown", "after"}
    assert [failure.split()[0] for failure in results["failed"]["failures"]] == ["large", "unknown", "first:"]
    assert "ValueError: a part" in results["failed"]["output"]
    assert "RuntimeError: all of it" in results["crashed"]["output"]
    assert results["skipped"]["output"] == "no card"
    text = report_text(list(results.values()), title="gpu", command="gpu.py")
    assert "0 of 4 checks passed" in text
    assert "* **large is 3, above 2**" in text
    late = list(run_checks(checks, bench, json_path=None, minutes=0.0))
    assert {result["status"] for result in late} == {"not started"}
