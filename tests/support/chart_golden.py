"""Golden outputs of the chart: `make golden` rewrites them, tests/chart/test_manifests.py compares with them.

Parts that change with every recipe are left out: texts in ConfigMaps, checksums, and names that contain a checksum.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import yaml

from tests.support.chart import CHART, NEWEST, ROOT, Rendering, render_file

FOLDER = ROOT / "tests" / "chart" / "golden"
CASES = {name: CHART / f"values-{name}.yaml" for name in ("cpu-quickstart", "searchers")}
"""A run with all its parts, and searchers alone."""
HASH_AT_END = re.compile(r"-[0-9a-f]{8}$")


def golden(made: Rendering) -> str:
    """Return every object as YAML, sorted by kind and name, without the parts that change with every recipe."""
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
    """Return the golden output of a case, rendered now."""
    return golden(render_file(CASES[name], kube=NEWEST))


if __name__ == "__main__":
    for old in FOLDER.glob("*.yaml"):
        old.unlink()
    for case in CASES:
        (FOLDER / f"{case}.yaml").write_text(made(case))
