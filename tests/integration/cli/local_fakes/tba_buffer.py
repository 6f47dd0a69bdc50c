"""A buffer service of fifty lines: run, stats, ledger and prompts, kept in one JSON file beside config.json."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CONFIG = Path(sys.argv[sys.argv.index("--config") + 1])
RECIPE = json.loads(CONFIG.read_text())
STATE_PATH = CONFIG.parent / "redis" / "fake_buffer.json"


def initial_state() -> dict[str, Any]:
    return {"state": "running", "reason": None, "lineage": 0, "parents": {}, "ledger": [], "prompts": {}, "evals": []}


LOCK = threading.Lock()
STATE: dict[str, Any] = json.loads(STATE_PATH.read_text()) if STATE_PATH.exists() else initial_state()


def active() -> list[dict[str, Any]]:
    return [line for line in STATE["ledger"] if line["kind"] == "batch" and not line["abandoned"]]


def run_info() -> dict[str, Any]:
    info = {"run": RECIPE["run"]["name"], "state_reason": STATE["reason"], "components": [], "waits": []}
    info |= {name: STATE[name] for name in ("state", "lineage", "parents", "evals")}
    info |= dict.fromkeys(("latest_version", "checkpoint", "checkpoint_key"))
    return {**info, "step": max((entry["step"] for entry in active()), default=0)}


def stats() -> dict[str, Any]:
    trained = 32 * len(active())
    splits = [prompt["split"] for prompt in STATE["prompts"].values()]
    none = ("num_scored", "num_pending", "num_failed", "num_prompts_seen", "payload_bytes", "log_position")
    found: dict[str, Any] = {**dict.fromkeys((*none, "num_publications"), 0), "run": RECIPE["run"]["name"]}
    found |= {name: {} for name in ("pushed", "refused", "evicted", "leases", "slots")}
    found |= {f"num_prompts_{split}": splits.count(split) for split in ("train", "heldout")}
    found |= dict.fromkeys(("num_rollouts", "rollouts_generated"), 2 * trained)
    found |= dict.fromkeys(("rollouts_drawn", "rollouts_trained"), trained)
    found |= {"samples_per_insert": 0.5, "realised_most_on_policy": 0.5, "mean_reward_recent": None}
    return found | {"policy_age_histogram": {0: trained, 4: trained}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/readyz":
            self.answer({"status": "ok"})
        elif self.path == "/v1/run":
            self.answer(run_info())
        elif self.path == "/v1/stats":
            self.answer(stats())
        elif self.path == "/v1/run?summary=true":
            remedy = json.loads(os.environ.get("FAKE_REMEDY", '"Try `x`."'))
            summary = {"state": "flat", "doing": "It runs.", "learning": None, "finding": "It is.", "remedy": remedy}
            self.answer({**run_info(), "summary": summary})
        elif self.path.startswith("/v1/curves"):
            none = {key: [] for key in ("names", "first_steps", "steps", "at_s")}
            self.answer({**none, "num_steps": 0, "num_steps_per_point": 1, "values": {}, "num_abandoned": 0})
        elif self.path.startswith("/v1/run/changes"):
            self.answer({"changes": [], "next": None})
        elif self.path.startswith("/v1/run/settings"):
            self.answer({"revision": 0, "settings": {}, "recipe": {}, "now": {}, "changes": [], "next": None})
        elif self.path.startswith("/v1/ledger"):
            after = int(self.path.partition("after=")[2].partition("&")[0] or 0)
            self.answer({"entries": STATE["ledger"][after:], "next": None})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/prompts":
            known = STATE["prompts"]
            new = [prompt for prompt in body["prompts"] if prompt["prompt_id"] not in known]
            known.update({prompt["prompt_id"]: prompt for prompt in new})
            stored = {f"num_{split}": stats()[f"num_prompts_{split}"] for split in ("train", "heldout")}
            self.answer({"num_new": len(new), "num_same": len(body["prompts"]) - len(new), **stored})
        elif self.path == "/v1/run":
            names = {"pause": "paused", "resume": "running", "stop": "stopping", "done": "done", "fail": "failed"}
            STATE.update(state=names[body["command"]], reason=body["reason"])
            self.answer(run_info())
        elif self.path == "/fake/lineage":
            step = run_info()["step"]
            STATE["parents"][str(STATE["lineage"] + 1)] = f"{STATE['lineage']}-{step}"
            STATE["lineage"] += 1
            STATE["state"] = "running"
            begun = {"kind": "resume", "lineage": STATE["lineage"], "parent": STATE["parents"][str(STATE["lineage"])]}
            STATE["ledger"].append({**begun, "trainer_id": "fake", "resumed_at_s": time.time()})
            self.answer({"lineage": STATE["lineage"], "step": step})
        elif self.path == "/fake/step":
            lineage, step = STATE["lineage"], body["step"]
            batch = {"kind": "batch", "lineage": lineage, "step": step, "batch_id": f"batch-{lineage}-{step}"}
            batch |= {"acked_at_s": time.time(), "num_rollouts": 32, "rollout_ids": ["00" * 16] * 32}
            batch["metrics"] = {"reward_mean": 0.5, "accuracy": 0.25, "policy_age_mean": 2.0, "wait_s": 0.0}
            STATE["ledger"].append({**batch, "abandoned": False})
            self.answer({})
        elif self.path == "/fake/eval":
            STATE["evals"].append(body)
            self.answer({})
        # requests have threads of their own, and the process may be killed: the file is whole at any moment
        with LOCK:
            half = STATE_PATH.with_suffix(".half")
            half.write_text(json.dumps(STATE))
            half.replace(STATE_PATH)

    def answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


print("fake buffer starts", flush=True)
ThreadingHTTPServer((RECIPE["buffer"]["host"], RECIPE["buffer"]["port"]), Handler).serve_forever()
