"""Measure what the live page costs with many rollouts and searchers: first paint, bytes per second, CPU of the buffer.

A real Redis, a real buffer process, a real Chromium, all on this machine. Rollouts are stored first; then as many
searchers as asked for send a heartbeat every 5 s and a trainer makes a step every second, for the whole time, and the
CPU seconds of the buffer process are taken over windows in turn: without a page, and with one that is open at its
overview.

    python benchmarks/page.py [--rollouts 1000000] [--searchers 256] [--windows 4] [--seconds 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tba.api import AckRequest, BatchRequest
from tba.clients import BufferClient
from tba.versions import PolicyVersion
from tba.wire import Heartbeat, encode_rollout
from tests.support.browser import find_chromium
from tests.support.buffer import Stack, make_prompts, make_rollout, start_lineage, start_stack

PUSH, NUM_PROMPTS, NUM_FIRST_STEPS = 512, 1000, 400
HEARTBEAT_S = 5.0
SHOWN = (
    *(
        "reward_mean",
        "accuracy",
        "kl_to_ref",
        "entropy",
        "ess",
        "clipped_share",
        "grad_norm",
        "grad_norm_limit",
        "loss",
    ),
    *("policy_age_mean", "policy_age_max", "tied_group_share", "step_s", "wait_s", "waited_s_total", "train_s"),
)
"""Metrics that the page asks for."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
MAX_PAINT_S, MAX_BYTES_PER_S, MAX_CPU_SHARE = 1.0, 100_000, 0.02


def main() -> int:
    """Measure, print a table, return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--searchers", type=int, default=256)
    parser.add_argument("--windows", type=int, default=4, help="pairs of windows, without and with a page")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a window")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tba-page-") as folder:
        sections: dict[str, Any] = {"buffer": {"max_rollouts": args.rollouts, "max_searchers_shown": args.searchers}}
        stack = start_stack(Path(folder), **sections)
        try:
            token = store(stack.client, args.rollouts)
            found = measure(stack, args.searchers, token, num_windows=args.windows, window_s=args.seconds)
        finally:
            stack.stop()
    found |= {"num_rollouts": args.rollouts, "num_searchers": args.searchers, "window_s": args.seconds}
    for name, value in found.items():
        print(f"{name:28} {value:,.4g}" if isinstance(value, float) else f"{name:28} {value}")
    targets = (
        ("first_paint_s", MAX_PAINT_S),
        ("bytes_per_s", MAX_BYTES_PER_S),
        ("cpu_share_of_page", MAX_CPU_SHARE),
    )
    missed = [f"{name} is {found[name]:.4g}, the target {most:g}" for name, most in targets if found[name] > most]
    for sentence in missed:
        print(f"MISSED: {sentence}")
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        args.json.write_text(json.dumps({"at": at, "machine": machine, "found": found}, indent=1) + "\n")
    return int(bool(missed))


def store(client: BufferClient, num_rollouts: int) -> str:
    """Push rollouts of NUM_PROMPTS prompts, make the first steps, and return the trainer's fencing token."""
    client.upload_prompts(make_prompts(NUM_PROMPTS))
    token = start_lineage(client).token
    for first in range(0, num_rollouts, PUSH):
        version = PolicyVersion(0, 0) if first == 0 else PolicyVersion(1, 1 + 200 * first // num_rollouts)
        payloads = [
            encode_rollout(make_rollout(f"train-{i % NUM_PROMPTS}", reward=float(i % 7), version=version))
            for i in range(first, min(first + PUSH, num_rollouts))
        ]
        client.push(payloads)
    # the curves have all their points
    for step in range(1, NUM_FIRST_STEPS + 1):
        make_step(client, token, step)
    return token


def measure(stack: Stack, num_searchers: int, token: str, *, num_windows: int, window_s: float) -> dict[str, Any]:
    """Open the page in turn, and compare the windows."""
    from playwright.sync_api import sync_playwright

    path, pid = find_chromium(), stack.buffer.process.pid
    if path is None:
        raise SystemExit("no Chromium: install Debian's package chromium, or name one in CHROMIUM")
    stop = threading.Event()
    threads = [
        threading.Thread(target=send_heartbeats, args=(stack.client, num_searchers, stop), daemon=True),
        threading.Thread(target=make_steps, args=(stack.client, token, stop), daemon=True),
    ]
    for thread in threads:
        thread.start()
    time.sleep(HEARTBEAT_S)
    paints: list[float] = []
    firsts: list[float] = []
    num_bytes, alone, beside = 0.0, list[float](), list[float]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for _ in range(num_windows):
            alone.append(cpu_of(pid, lambda: time.sleep(window_s)))
            page = browser.new_page()
            began = time.monotonic()
            page.goto(stack.buffer.url)
            while page.inner_text("#run-name") == "tba":
                page.wait_for_timeout(10)
            firsts.append(time.monotonic() - began)
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            paints.append(page.evaluate(paint) / 1000)
            page.wait_for_timeout(3000)  # the files of the page and its first answers are no updates
            before = transferred(page)
            beside.append(cpu_of(pid, lambda page=page: page.wait_for_timeout(1000 * window_s)))
            num_bytes += transferred(page) - before
            page.close()
        browser.close()
    stop.set()
    for thread in threads:
        thread.join()
    shares = [(with_page - without) / window_s for without, with_page in zip(alone, beside, strict=True)]
    return {
        "first_paint_s": statistics.median(paints),
        "first_data_s": statistics.median(firsts),
        "bytes_per_s": num_bytes / (num_windows * window_s),
        "cpu_share_without": statistics.mean(alone) / window_s,
        "cpu_share_of_page": statistics.mean(shares),
        "cpu_share_of_page_windows": [round(share, 4) for share in shares],
    }


def transferred(page: Any) -> float:
    """Return the bytes of the bodies of everything that the page has loaded."""
    return page.evaluate(
        "(performance.setResourceTimingBufferSize(100000), "
        "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.encodedBodySize, 0))"
    )


def cpu_of(pid: int, wait: Callable[[], object]) -> float:
    """Return the CPU seconds that a process takes while `wait` runs."""
    before = cpu_seconds(pid)
    wait()
    return cpu_seconds(pid) - before


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def send_heartbeats(client: BufferClient, num_searchers: int, stop: threading.Event) -> None:
    """Let every searcher send one heartbeat per HEARTBEAT_S, evenly spread, until `stop` is set."""
    step = 0
    while not stop.is_set():
        step += 1
        for number in range(num_searchers):
            client.heartbeat(
                Heartbeat(
                    component_id=f"searcher-{number}",
                    kind="searcher",
                    run="test",
                    state="generating",
                    version=PolicyVersion(1, step),
                    wait=None,
                    gauges={"tokens_per_s": 1000.0 + number + step, "active_slots": 8.0, "unpushed": float(step % 3)},
                )
            )
            if stop.wait(HEARTBEAT_S / num_searchers):
                return


def make_steps(client: BufferClient, token: str, stop: threading.Event) -> None:
    """Make a step per second until `stop` is set."""
    step = NUM_FIRST_STEPS
    while not stop.wait(1.0):
        step += 1
        make_step(client, token, step)


def make_step(client: BufferClient, token: str, step: int) -> None:
    """Draw and ack a batch, with as many metrics as a trainer has."""
    batch = client.draw_batch(BatchRequest(trainer_id="trainer-1", lineage=1, step=step, token=token, wait_s=10))
    names = [*SHOWN, *map("more_{}".format, range(20))]
    metrics: dict[str, float | None] = {name: 1.0 / (step + number) for number, name in enumerate(names)}
    client.ack(batch.batch_id, AckRequest(lineage=1, step=step, token=token, metrics=metrics))


if __name__ == "__main__":
    sys.exit(main())
