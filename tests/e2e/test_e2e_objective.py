"""A whole run whose searchers compute the log-probs of the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tba_trainer.learner.learner import Learner
from tba_trainer.model.policy import load_policy

from tba.config import parse_recipe
from tba.versions import START
from tests.e2e.conftest import MakePlace
from tests.support.e2e import decode_all, stored_rollouts


def test_searchers_compute_the_ref_log_probs_and_the_trainer_trains_with_them(
    make_place: MakePlace, model: Path
) -> None:
    place = make_place(
        objective={"preset": "tb", "beta": 0.1, "reference_placement": "searcher"},
        trainer={"num_steps": 16, "sync_interval": 2, "checkpoint_interval": 4},
        sampling={"samples_per_insert_error": 32},  # rollouts wait for training, so some are of later versions
    )
    started = place.start("--set", "model.policy_temperature=0.8")
    assert started.wait() == 0, started.err + started.out
    ledger = place.ledger()
    assert [entry.step for entry in ledger] == list(range(1, 17))
    assert all(entry.metrics["kl_to_ref"] is not None for entry in ledger)
    assert {entry.num_rollouts for entry in ledger} == {16}  # none was refused
    assert any(entry.metrics["grad_norm"] for entry in ledger)
    with place.redis_of_ended_run() as redis:
        rollouts = decode_all(stored_rollouts(redis.url))
    assert len(rollouts) >= 16 * 16 / 2
    assert {r.version for r in rollouts} > {START}  # later versions have the same reference
    carried = [r.ref_logprob for r in rollouts]
    assert all(ref is not None and ref.version == START for ref in carried)
    start = {"path": str(model), "policy_temperature": 0.8}
    recipe = parse_recipe({**place.recipe, "model": start, "objective": {"preset": "tb"}}, where="test")
    theirs = Learner(
        load_policy(recipe.model, device="cpu", gradient_checkpointing=False), recipe, np.random.default_rng(0)
    ).reference
    bare = [replace(r, ref_logprob=None) for r in rollouts]
    expected = theirs.logprobs(bare)
    assert expected is not None
    assert theirs.num_computed == len(rollouts)
    assert [ref.value for ref in carried if ref is not None] == pytest.approx(expected, abs=1e-4)
