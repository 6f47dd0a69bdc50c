"""Golden outputs of the chart: `make golden` writes them again, tests/chart/test_golden.py compares.

What changes with every recipe is left out: texts in ConfigMaps, checksums, and the names that have one.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

from tests.support.chart import CHART, NEWEST, OLDEST, ROOT, SCENARIOS, Rendering, render_file

FOLDER = ROOT / "tests" / "chart" / "golden"
CASES: dict[str, tuple[Path, str]] = {
    "cpu-quickstart": (CHART / "values-cpu-quickstart.yaml", NEWEST),
    "cpu-quickstart-on-1.20": (CHART / "values-cpu-quickstart.yaml", OLDEST),
    "gsm8k-4gpu": (CHART / "values-gsm8k-4gpu.yaml", NEWEST),
    "math-7b-8gpu": (CHART / "values-math-7b-8gpu.yaml", NEWEST),
    "external": (SCENARIOS / "external.yaml", NEWEST),
    "nodes": (SCENARIOS / "nodes.yaml", NEWEST),
}
HASH_AT_END = re.compile(r"-[0-9a-f]{8}$")


def golden(made: Rendering) -> str:
    """Every object in the order of kind and name, without what changes with every recipe."""
    objects = sorted((_steady(x) for x in made.objects), key=lambda x: (x["kind"], x["metadata"]["name"]))
    return "---\n".join(yaml.safe_dump(x, sort_keys=True, width=200, default_flow_style=None) for x in objects)


def _steady(found: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(found)
    if found["kind"] == "ConfigMap":
        found["data"] = dict.fromkeys(found["data"], "<text>")
    if found["kind"] == "PrometheusRule":
        found["spec"] = {"groups": "<files/rules.yaml>"}
    if found["kind"] == "Job":
        found["metadata"]["name"] = HASH_AT_END.sub("-<hash>", found["metadata"]["name"])
    pod = found.get("spec", {}).get("template", {}).get("metadata", {})
    for metadata in (found["metadata"], pod):
        for name in metadata.get("annotations", {}):
            if name.startswith("checksum/"):
                metadata["annotations"][name] = "<checksum>"
    return found


def made(name: str) -> str:
    """The golden output of a case, as the chart makes it now."""
    path, kube = CASES[name]
    return golden(render_file(path, kube=kube))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        (FOLDER / f"{case}.yaml").write_text(made(case))
