"""`make test-cluster`: the chart on a real Kubernetes, from helm install to nothing left.

    install (time to the first optimizer step) -> kill the pods of each kind -> scale 1, 4, 1 through the REST API
    -> upgrade with changed values -> rollback -> evictions, a drain -> reinstall on kept claims -> helm test
    -> stop, result, ledger -> uninstall, nothing is left -> installations that cannot work

It takes helm and kubectl from PATH and the cluster of the current context; images come from a registry
(TBA_CLUSTER_SETS="image.registry=..."), or are brought in by TBA_CLUSTER_LOAD (kube.py). TBA_CLUSTER_PATIENCE=3 gives
every deadline three times as long. Exit code 0 also where there
is no cluster: then it says why it was skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import tba
from tests.system.cluster import faults, stages
from tests.system.cluster.kube import LOAD, PREFIX, StageError, load, run, why_not
from tests.system.cluster.release import CHART, Release

HERE = Path(__file__).parent
NUM_STEPS_OF_THE_QUICKSTART = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write what was found here")
    parser.add_argument("--keep", action="store_true", help="leave a failed release in place, to look at it")
    args = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    report = stages.Report()
    extra = shlex.split(os.environ.get("TBA_CLUSTER_SETS", ""))
    values = [CHART / "values-cpu-quickstart.yaml", HERE / "longer.yaml"]
    release = Release("tba", f"tba-test-{int(time.time())}", values, extra)
    print(versions(), flush=True)
    try:
        if LOAD:
            with report.stage("load images"):
                load(release.images())
        release.make_namespace()
        everything(release, extra, report)
    except StageError as error:
        print(f"FAILED: {error}\n\n{release.why()}", file=sys.stderr, flush=True)
        return 1
    finally:
        if args.json:
            Path(args.json).write_text(json.dumps({"versions": versions(), "stages": report.rows}, indent=2))
        if not args.keep:
            run("helm", "uninstall", release.name, "-n", release.namespace, "--ignore-not-found", check=False)
            run("kubectl", "delete", "namespace", release.namespace, "--wait=false", check=False)
    print("every stage passed")
    return 0


def everything(release: Release, extra: list[str], report: stages.Report) -> None:
    stages.install(release, report)
    stages.kill_every_kind(release, report)
    stages.scale(release, report)
    stages.change(release, report, values=HERE / "changed.yaml", observe=lambda: len(release.ready("reward")) == 2)
    stages.move_pods(release, report)
    stages.helm_test(release, report)
    with report.stage("as many steps as the quickstart"):
        release.until_step(NUM_STEPS_OF_THE_QUICKSTART, deadline_s=900)
    release.tba("stop", "--reason", "the cluster test has seen enough")
    stages.finish(release, report, deadline_s=300)
    stages.uninstall(release, report)
    faults.everything(release.namespace, extra, report)


def versions() -> str:
    helm = run("helm", "version", "--short", check=False).stdout.strip()
    server = json.loads(run("kubectl", "version", "-o", "json", check=False).stdout or "{}")
    kubernetes = server.get("serverVersion", {}).get("gitVersion", "unknown")
    prefix = " (behind a prefix)" if PREFIX else ""
    return f"{time.strftime('%Y-%m-%d')}: tba {tba.__version__}, helm {helm}, kubernetes {kubernetes}{prefix}"


if __name__ == "__main__":
    sys.exit(main())
