"""Print pip constraints that leave every package of this Python as it is: for images that have torch and vLLM already.

    python3 deploy/base_constraints.py constraints.txt > /tmp/constraints.txt

What this Python has is pinned to the version it has; what it has not keeps its pin from constraints.txt. Where the two
cannot go together, pip says so and the build ends. Only the standard library is used.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def normalised(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(pins: str) -> list[str]:
    """The lines, given the text of constraints.txt."""
    here = {normalised(found.metadata["Name"]): found.version for found in distributions() if found.metadata["Name"]}
    own = [line for line in pins.splitlines() if "==" in line and not line.startswith("#")]
    return [f"{name}=={version}" for name, version in sorted(here.items())] + [
        line for line in own if normalised(line.partition("==")[0]) not in here
    ]


if __name__ == "__main__":
    print("\n".join(constraints(Path(sys.argv[1]).read_text())))
