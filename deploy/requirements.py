"""Print the requirements of packages of this repository, so that an image installs them in a layer before the code.

    python deploy/requirements.py '.[service]' 'services/reward[math]' > requirements.txt

Each argument is a folder with a pyproject.toml and the extras to include. Uses the standard library alone, since it
runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

OWN = {"tba-rl", "tba-buffer", "tba-reward", "tba-searcher", "tba-trainer"}
"""Packages of this repository; images install them from their source."""


def requirements(arguments: list[str]) -> list[str]:
    """Return the requirements of FOLDER[EXTRA,...] arguments, sorted, each once.

    Raises:
        SystemExit: a folder has no pyproject.toml, or a package does not have an extra.
    """
    found: set[str] = set()
    for argument in arguments:
        folder, _, extras = argument.rstrip("]").partition("[")
        path = Path(folder) / "pyproject.toml"
        if not path.is_file():
            raise SystemExit(f"error: {path} does not exist; name the folder of a package of this repository")
        project = tomllib.loads(path.read_text())["project"]
        found.update(project.get("dependencies", []))
        known = project.get("optional-dependencies", {})
        for extra in filter(None, extras.split(",")):
            if extra not in known:
                raise SystemExit(f"error: {project['name']} has no extra {extra!r}; it has {', '.join(sorted(known))}")
            found.update(known[extra])
    return sorted(line for line in found if re.split(r"[\[<>=!~ ;]", line)[0] not in OWN)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
