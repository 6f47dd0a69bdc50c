"""Builders of a searcher's visits and completions, without an engine and a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tba_searcher.engines.engine import Completion
from tba_searcher.generation.visits import Visit

from tba.api import Lease, Prompt
from tba.versions import START, PolicyVersion
from tba.wire import Sampling, VersionSpan
from tba.wire.sequences import FinishReason

PROMPT = Prompt(prompt_id="p", task="addition", text="1+1=")


def make_visit(name: str = "lease", *, pinned: PolicyVersion | None = None, **lease: Any) -> Visit:
    """Return a visit of three rollouts: of training, or with `pinned` of the samples of an evaluation."""
    defaults = {"kind": "train" if pinned is None else "sample", "prompt": PROMPT, "num_rollouts": 3}
    fields = {"visit_id": f"visit-{name}", "temperature": 1.0, "expires_in_s": 60, **defaults, **lease}
    return Visit(lease=Lease(lease_id=name, **fields), prompt_tokens=(5, 6), pinned=pinned)


def make_completion(request_id: str, tokens: Sequence[int] = (1,), finish_reason: FinishReason = "stop") -> Completion:
    """Return a completion that the starting model sampled."""
    return Completion(
        request_id=request_id,
        response_tokens=np.array(tokens, np.int32),
        sampler_logprobs=np.full(len(tokens), -0.5, np.float32),
        sampling=Sampling.of(1.0),
        finish_reason=finish_reason,
        version_spans=(VersionSpan.of(START, 0, len(tokens)),),
        started_at_s=0.0,
        finished_at_s=1.0,
    )
