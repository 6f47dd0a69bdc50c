"""Record all functions that chosen root functions call, in every process with this folder on its path.

Python imports `sitecustomize` at its start. ROUTE_ROOTS names the root functions by qualified name. A thread watches
ROUTE_FOLDER: recording begins when the file `start` exists (PID.on confirms it), and ends with the file `stop`. Then
PID.route has a line for each function of tba that a root called, directly or not: file, qualified name, root. A Redis
script has the file `NAME.lua`: ROUTE_SCRIPTS names the function that runs scripts, and its argument `name` is NAME.
Calls below a function that ROUTE_BESIDE names are left out.
"""

import os
import sys
import threading
import time

EVERY_S = 0.02
MAX_WALKS = 2000
"""A function is no longer recorded after this many calls in a row that show no new root above it."""
roots = frozenset(os.environ.get("ROUTE_ROOTS", "").split())
beside = frozenset(os.environ.get("ROUTE_BESIDE", "").split())
scripts = os.environ.get("ROUTE_SCRIPTS", "")
recording = False
found: set = set()
"""Pairs (function or script, root above it)."""
walks: dict = {}


def record(frame, event, _argument) -> None:
    code = frame.f_code
    if not recording or event != "call" or "/tba" not in code.co_filename:
        return
    names_script = code.co_qualname == scripts
    if not names_script:
        walks[code] = walks.get(code, 0) + 1
        if walks[code] > MAX_WALKS:
            return
    caller = frame
    while caller is not None and caller.f_code.co_qualname not in beside:
        root = caller.f_code.co_qualname
        if root in roots and "/tba" in caller.f_code.co_filename:
            if (code, root) not in found:
                found.add((code, root))
                walks[code] = 0
            if names_script:
                found.add((frame.f_locals["name"], root))
            return
        caller = caller.f_back


def watch(folder: str) -> None:
    global recording
    while not os.path.exists(os.path.join(folder, "start")):
        time.sleep(EVERY_S)
    recording = True
    open(os.path.join(folder, f"{os.getpid()}.on"), "w").close()
    while not os.path.exists(os.path.join(folder, "stop")):
        time.sleep(EVERY_S)
    recording = False
    lines = sorted({"\t".join([*where(item), root]) + "\n" for item, root in found})
    half = os.path.join(folder, f"{os.getpid()}.half")
    with open(half, "w") as file:
        file.writelines(lines)
    os.replace(half, half.removesuffix(".half") + ".route")


def where(item) -> tuple[str, str]:
    return (f"{item}.lua", "script") if isinstance(item, str) else (item.co_filename, item.co_qualname)


def begin() -> None:
    # this thread is not recorded: it starts before the profile function is set for threads
    threading.Thread(target=watch, args=(os.environ["ROUTE_FOLDER"],), daemon=True).start()
    threading.setprofile(record)
    sys.setprofile(record)


if "ROUTE_FOLDER" in os.environ:
    begin()
    os.register_at_fork(after_in_child=begin)
