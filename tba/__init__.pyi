"""What editors and type checkers see of `tba`: `run` and `Run` are imported only where they are used.

It is a stub because no module of this package may import `tba_cli` (the contracts in pyproject.toml).
"""

from tba_cli.scripting import Run as Run
from tba_cli.scripting import run as run

__version__: str
