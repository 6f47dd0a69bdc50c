"""Run the code cells of a notebook in order, as Jupyter does but without it: `python -m tests.support.notebook FILE`.

As in Jupyter, `inspect` finds the source of functions, the module is `__main__`, and an event loop is running.
"""

from __future__ import annotations

import asyncio
import json
import linecache
import sys
from pathlib import Path
from types import ModuleType


async def run_cells(path: Path) -> None:
    """Run all code cells of a notebook; stop at the first error."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        source, name = "".join(cell["source"]), f"<cell {number}>"
        # no time of change: nothing looks for a file of this name
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), main.__dict__)


if __name__ == "__main__":
    asyncio.run(run_cells(Path(sys.argv[1])))
