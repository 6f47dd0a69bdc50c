"""Record which functions run below chosen ones, between two moments, in every process with this folder on its path.

Python imports `sitecustomize` at its start. ROUTE_ROOTS names the chosen functions by qualified name. A thread watches
ROUTE_FOLDER: recording begins when a file `start` is there (PID.on says so), and ends with `stop`. Then PID.route has a
line for each function of tba that a chosen one called, directly or not: file, tab, qualified name. Calls below a
function that ROUTE_BESIDE names are left out.
"""

import os
import sys
import threading
import time

EVERY_S = 0.02
roots = frozenset(os.environ.get("ROUTE_ROOTS", "").split())
beside = frozenset(os.environ.get("ROUTE_BESIDE", "").split())
recording = False
codes: set = set()


def record(frame, event, _argument) -> None:
    if not recording or event != "call" or frame.f_code in codes or "/tba" not in frame.f_code.co_filename:
        return
    caller = frame
    while caller is not None and caller.f_code.co_qualname not in beside:
        if caller.f_code.co_qualname in roots and "/tba" in caller.f_code.co_filename:
            codes.add(frame.f_code)
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
    lines = sorted({f"{code.co_filename}\t{code.co_qualname}\n" for code in codes})
    half = os.path.join(folder, f"{os.getpid()}.half")
    with open(half, "w") as file:
        file.writelines(lines)
    os.replace(half, half.removesuffix(".half") + ".route")


def begin() -> None:
    # this thread is not recorded: it starts before the profile function is set for threads
    threading.Thread(target=watch, args=(os.environ["ROUTE_FOLDER"],), daemon=True).start()
    threading.setprofile(record)
    sys.setprofile(record)


if "ROUTE_FOLDER" in os.environ:
    begin()
    os.register_at_fork(after_in_child=begin)
