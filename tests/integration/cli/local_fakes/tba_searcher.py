"""A searcher that generates nothing and leaves when the run is over.

FAKE_SEARCHER: config (all leave, and say that their settings are wrong).
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

recipe = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
name = os.environ["TBA_SEARCHER_ID"]
print(f"{name} starts with threads {os.environ['OMP_NUM_THREADS']} stdin {sys.stdin.read()!r}", flush=True)
if os.environ.get("FAKE_SEARCHER") == "config":
    print("error: searcher: the engine does not decode this model", flush=True)
    sys.exit(4)
token = json.loads(Path(os.environ["TBA_AUTH__TOKENS_FILE"]).read_text())["searcher"]
run = urllib.request.Request(recipe["buffer"]["url"] + "/v1/run", headers={"authorization": f"Bearer {token}"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
while json.loads(opener.open(run).read())["state"] not in ("done", "failed"):
    time.sleep(0.05)
