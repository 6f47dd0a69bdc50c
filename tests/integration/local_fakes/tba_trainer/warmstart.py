"""A warm start that writes a config, a tokenizer and nothing to learn from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

model = Path(json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())["model"]["path"])
model.mkdir(parents=True, exist_ok=True)
(model / "tokenizer.json").write_text("{}")
(model / "config.json").write_text("{}")
