"""`make test-compose`: docker-compose.yml with deploy/cpu.env on a real engine, from up to nothing left.

    images -> up (time to the first optimizer step) -> locked down -> kill -9 of each service while training
    -> the quickstart's result, ledger -> down, nothing is left

It takes docker from PATH, and the images that `make images` built. Exit code 0 also where there is no engine: then it
says why it was skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import tba
from tba.logs import silence_retries
from tests.support.redis_process import free_port
from tests.system.cluster.kube import StageError
from tests.system.cluster.stages import Report
from tests.system.compose import stages
from tests.system.compose.engine import Project, run, why_not

LEAST_ACCURACY = 0.85
"""The quickstart ends at 0.95 and more and starts at 0.30 to 0.36 (README.md)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write what was found here")
    parser.add_argument("--keep", action="store_true", help="leave a failed project in place, to look at it")
    args = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    silence_retries()  # services are killed here on purpose
    report, tag = Report(), os.environ.get("TBA_TAG", tba.__version__)
    print(versions(), flush=True)
    with tempfile.TemporaryDirectory(prefix="tba-compose-") as folder:
        os.chmod(folder, 0o755)  # containers read the secrets in it
        project = Project(f"tba-test-{int(time.time())}", Path(folder), port=free_port())
        try:
            stages.images(report, tag)
            stages.start(project, report)
            stages.locked_down(project, report)
            stages.kill_each(project, report)
            stages.finish(project, report, deadline_s=2400, least_accuracy=LEAST_ACCURACY)
            stages.stop(project, report)
        except StageError as error:
            print(f"FAILED: {error}\n\n{project.why()}", file=sys.stderr, flush=True)
            return 1
        finally:
            if args.json:
                Path(args.json).write_text(json.dumps({"versions": versions(), "stages": report.rows}, indent=2))
            if not args.keep:
                project.compose("down", "--volumes", "--timeout", "10", check=False)
    print("every stage passed")
    return 0


def versions() -> str:
    engine = run("docker", "version", "--format", "{{.Server.Version}}").strip()
    compose = run("docker", "compose", "version", "--short").strip()
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d')}: tba {tba.__version__}, docker {engine}, compose {compose}, "
        f"{os.cpu_count()} CPUs, load {load:.1f} at the start"
    )


if __name__ == "__main__":
    sys.exit(main())
