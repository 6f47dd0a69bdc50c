"""The rules that both pools of pools.py apply; importing this module loads what their workers share."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from tba_reward.math import grader
from tba_reward.scorer import Item, Params, params_of

from tba.config.reward import MathSpec

MATH_PARAMS: dict[str, Any] = params_of(MathSpec(kind="math"))
grader.warm_up(MATH_PARAMS)  # both pools preload this module, so that both fork workers that are warm


def trivial(item: Item, params: Params) -> float:
    """Return 1.0 for a response with an `a`."""
    return float("a" in item.response)


def maths_or_hang(item: Item, params: Params) -> float:
    """Grade a maths item; hang over one whose data says so, in C code that holds the GIL."""
    if item.data.get("hang"):
        re.search("(a+)+$", "a" * 60 + "b")
    return grader.score(item, params)


def hang_with_child(item: Item, params: Params) -> float:
    """Start a process, write its pid to the file in the item's data, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(item.data["pid_file"], "w") as file:
        file.write(str(child.pid))
    re.search("(a+)+$", "a" * 60 + "b")
    return 0.0


def exhaust_memory(item: Item, params: Params) -> float:
    """Need more memory than a worker may have."""
    return float(len(bytearray(8 << 30)))
