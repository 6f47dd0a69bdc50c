"""Ask the public databases which pinned packages have known vulnerabilities (`make audit`).

Exit code 1: some are known. Exit code 0: none is known, or no database could be asked; then the reasons are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SERVICES = ("pypi", "osv")
DEADLINE_S = 600


def ask(service: str, requirements: Sequence[str]) -> dict[str, Any] | str:
    """Return pip-audit's report on requirements files, or a text that says why there is none."""
    files = [part for path in requirements for part in ("-r", path)]
    command = [sys.executable, "-m", "pip_audit", "-s", service, "-f", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--no-deps", "--disable-pip", "--timeout", "10", *files],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer for {DEADLINE_S} s"
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        lines = done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode} and said nothing"]
        return lines[-1][:300]


def summary(report: Mapping[str, Any]) -> tuple[int, int, list[str]]:
    """Return (number of packages looked up, number of unknown packages, one line per vulnerability)."""
    found: list[str] = []
    num_audited = num_skipped = 0
    for package in report["dependencies"]:
        if "skip_reason" in package:
            num_skipped += 1
            continue
        num_audited += 1
        for flaw in package["vulns"]:
            fixed = ", ".join(flaw["fix_versions"]) or "no release"
            names = ", ".join([flaw["id"], *flaw.get("aliases", [])])
            found.append(f"{package['name']} {package['version']}: {names}; fixed in {fixed}")
    return num_audited, num_skipped, found


def main(requirements: Sequence[str]) -> int:
    """Ask the databases in turn until one knows any of the packages; print its answer, return the exit code."""
    reasons: list[str] = []
    for service in SERVICES:
        report = ask(service, requirements)
        if isinstance(report, str):
            reasons.append(f"{service}: {report}")
            continue
        num_audited, num_skipped, found = summary(report)
        if not num_audited:
            reasons.append(f"{service}: it knows none of the {num_skipped} packages, so it is no database of them")
            continue
        for line in found:
            print(line)
        print(f"{service}: {num_audited} packages looked up, {num_skipped} unknown there, {len(found)} vulnerabilities")
        return 1 if found else 0
    print("skipped: no database of vulnerabilities could be asked from here")
    for reason in reasons:
        print(f"  {reason}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("usage: audit.py REQUIREMENTS_FILE ...", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1:]))
