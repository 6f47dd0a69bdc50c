"""Print pip constraints that keep every package of this Python as it is: for images that have torch and vLLM already.

    python3 deploy/base_constraints.py deploy/constraints/main.txt > /tmp/constraints.txt

An installed package is pinned to its version; the others keep their pins from that file. If the two conflict,
pip says so and the build ends. Uses the standard library alone.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def normalised(name: str) -> str:
    """Return a package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(pins: str) -> list[str]:
    """Return the lines, given the text of the pins."""
    here = {normalised(found.metadata["Name"]): found.version for found in distributions() if found.metadata["Name"]}
    own = [line for line in pins.splitlines() if "==" in line and not line.startswith("#")]
    return [f"{name}=={version}" for name, version in sorted(here.items())] + [
        line for line in own if normalised(line.partition("==")[0]) not in here
    ]


if __name__ == "__main__":
    print("\n".join(constraints(Path(sys.argv[1]).read_text())))
