"""A searcher that generates nothing and leaves when the run is over; FAKE_SEARCHER=die: searcher-0 leaves at once."""

from __future__ import annotations

import os
import sys
import time

from tba.clients import BufferClient
from tba.config import load_recipe

recipe = load_recipe(sys.argv[sys.argv.index("--config") + 1])
name = os.environ["TBA_SEARCHER_ID"]
print(f"{name} nice {os.nice(0)} threads {os.environ['OMP_NUM_THREADS']} stdin {sys.stdin.read()!r}", flush=True)
if os.environ.get("FAKE_SEARCHER") == "all-die" or (name == "searcher-0" and os.environ.get("FAKE_SEARCHER") == "die"):
    sys.exit(7)
client = BufferClient(recipe.buffer_url, retry_s=0)
while client.run().state not in ("done", "failed"):
    time.sleep(0.05)
