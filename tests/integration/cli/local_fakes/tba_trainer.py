"""A trainer that only counts steps; FAKE_TRAINER says how it ends: ok, error, fail, wait-at-2 (for ever), die-at-2.

`no-steps` speaks to a real buffer service: it takes a lineage, waits for the state `stopping`, and says done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from types import FrameType

CONFIG = Path(sys.argv[sys.argv.index("--config") + 1])
RECIPE = json.loads(CONFIG.read_text())
BEHAVIOUR = os.environ.get("FAKE_TRAINER", "ok")


def post(path: str, body: dict) -> dict:
    request = urllib.request.Request(RECIPE["buffer"]["url"] + path, json.dumps(body).encode(), method="POST")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return json.loads(reply.read())


def evaluate(version: str, accuracy: float) -> None:
    result = {"eval_id": f"eval-{version}", "version": version, "state": "done", "num_prompts": 8, "num_done": 8}
    result |= {"accuracy": accuracy, "greedy_accuracy": accuracy + 0.1}
    post("/fake/eval", {**result, "created_at_s": time.time(), "finished_at_s": time.time()})


def checkpoint(number: int, frame: FrameType | None) -> None:
    (CONFIG.parent / "checkpoint_on_sigterm").write_text(os.environ["OMP_NUM_THREADS"])
    print("checkpoint written", flush=True)
    sys.exit(143)


signal.signal(signal.SIGTERM, checkpoint)
if BEHAVIOUR == "error":
    print("error: trainer: the learning rate is silly", file=sys.stderr)
    sys.exit(2)
if BEHAVIOUR == "no-steps":
    from tba.api import LineageRequest, RunCommand
    from tba.clients import BufferClient
    from tba.tokens import role_token

    client = BufferClient(RECIPE["buffer"]["url"], token=role_token(os.environ["TBA_AUTH__TOKENS_FILE"], "trainer"))
    token = client.new_lineage(LineageRequest(trainer_id="fake", parent="0-0")).token
    while client.run().state != "stopping":
        time.sleep(0.05)
    client.command("done", RunCommand(reason="stopped by a person", token=token))
    sys.exit(0)
begun = post("/fake/lineage", {})
if BEHAVIOUR == "fail":
    post("/v1/run", {"command": "fail", "reason": "the loss is not finite", "token": "t"})
    print("error: trainer: the loss is not finite", file=sys.stderr)
    sys.exit(2)
if begun["step"] == 0:
    evaluate("0-0", 0.25)
for step in range(begun["step"] + 1, RECIPE["trainer"]["num_steps"] + 1):
    post("/fake/step", {"step": step})
    print(f"2026-01-01T00:00:00Z [warning  ] step {step}", flush=True)
    if step == 2 and BEHAVIOUR == "die-at-2":
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    while step == 2 and BEHAVIOUR == "wait-at-2":
        time.sleep(0.05)
    time.sleep(0.02)
evaluate(f"{begun['lineage']}-{RECIPE['trainer']['num_steps']}", 0.5)
export = Path(RECIPE["store"]["url"].removeprefix("file://")) / "runs" / RECIPE["run"]["name"] / "export"
export.mkdir(parents=True, exist_ok=True)
(export / "config.json").write_text('{"exported": true}')
post("/v1/run", {"command": "done", "reason": None, "token": "t"})
