"""Runs the cases of engine_contract.py and vllm_cases.py on vLLM, in a process of its own: vLLM changes the process it
is in (torch's threads, compilation, the garbage collector), and warns a lot.

`python -m tests.support.engine_cases FOLDER` prints, as its last line, {case: "passed" or a traceback}.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from tba_searcher.engines.engine import Engine, EngineSettings
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings

from tba.versions import PolicyVersion
from tests.support.engine_contract import (
    CASES,
    LAST,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    NUM_SLOTS,
    Bench,
    Make,
    Model,
)

SIZES: dict[str, Any] = {
    "num_slots": NUM_SLOTS,
    "max_prompt_tokens": MAX_PROMPT_TOKENS,
    "max_response_tokens": MAX_RESPONSE_TOKENS,
}


def make_embedded(folder: Path, tensors: Path, version: PolicyVersion, dtype: str) -> Engine:
    """The embedded engine."""
    return EmbeddedEngine(folder, version, EngineSettings(**SIZES, seed=1, dtype=dtype))


def make_vllm(folder: Path, tensors: Path, version: PolicyVersion, dtype: str) -> Engine:
    """The vLLM engine."""
    return VllmEngine(folder, [tensors], version, VllmSettings(**SIZES, seed=2**40 + 1, dtype=dtype))


class Benches:
    """One bench per model, made when it is first asked for."""

    def __init__(self, make_engine: Make, root: Path) -> None:
        self._make_engine, self._root = make_engine, root
        self.of = cache(self._of)

    def _of(self, model: str) -> Bench:
        folder = self._root / model.replace(" ", "-")
        old, new = (Model.make(folder / name, model, seed) for seed, name in enumerate(("old", "new")))
        return Bench(self._make_engine, old, new, folder)


def main(root: Path) -> None:
    """The process."""
    from tests.support.vllm_cases import VLLM_CASES

    gc.collect = lambda generation=2: 0  # vLLM asks four times per engine, and each walks over all of torch: 0.6 s
    benches, outcome = Benches(make_vllm, root), {}
    for name, (model, case) in sorted({**CASES, **VLLM_CASES}.items(), key=lambda item: item[1][1] in LAST):
        start_s = time.monotonic()
        try:
            case(benches.of(model))
            outcome[name] = "passed"
        except Exception:
            outcome[name] = traceback.format_exc()
        print(f"{time.monotonic() - start_s:6.2f} s  {name}", file=sys.stderr)
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
