"""The actions of the guards in one run over a real buffer: pause, rollback; what the ledger says."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_trainer.learner.learner import Learner
from tba_trainer.trainer import train

from tba.api import RollbackRequest, RunCommand
from tba.store import FileStore
from tba.wire import Batch, encode_rollout
from tba_cli.commands.report import check_command
from tba_cli.commands.status import status_lines
from tba_cli.parser import parse_arguments
from tba_cli.reports.ledger import batch_entries
from tests.support.buffer import make_prompts
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.guards import make_guards
from tests.support.trainer_values import make_rollout, recipe_of_buffer
from tests.support.waits import DEADLINE_S, until

FINE = {"ess": 0.9, "log_ratio_token_mean": 0.0, "grad_norm": 1.0, "logprob_gap_on_policy": None}
FIRST_TIME = {
    4: {"ess": 0.01, "log_ratio_token_mean": -3.0},  # no action; the batch is used
    7: {"loss": math.nan, "grad_norm": math.nan},  # rollback to step 5
    9: {"grad_norm": 1e6},  # pause
}
GUARDS = {
    "ess_collapse": {"patience_steps": 1},
    "log_ratio_drift": {"patience_steps": 1},
    "non_finite": {"action": "rollback"},
    "grad_spike": {"action": "pause", "window_steps": 4},
}


def test_pause_and_rollback_over_a_real_buffer(
    serve_buffer: ServeBuffer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gradients, seen = Learner.gradients, set[int]()

    def changed(self: Learner, batch: Batch, *, step: int, policy_ages: Sequence[int], **kwargs: Any) -> Any:
        first = FIRST_TIME.get(step, {}) if step not in seen else {}
        seen.add(step)
        return gradients(self, batch, step=step, policy_ages=policy_ages, **kwargs) | FINE | first

    monkeypatch.setattr(Learner, "gradients", changed)
    buffer = serve_buffer(store={"url": f"file://{tmp_path / 'store'}"})
    settings = {"num_steps": 10, "checkpoint_interval": 5, "export": False, "learning_rate": {"value": 1e-3}}
    recipe = recipe_of_buffer(buffer.recipe, model, guards=make_guards(**GUARDS), **settings)
    client, rng = buffer.client(), np.random.default_rng(0)
    client.upload_prompts(make_prompts(8, 4))
    rollouts = [make_rollout(rng, prompt_id=f"train-{i % 8}", run="test", reward=float(i % 3)) for i in range(48)]
    client.push([encode_rollout(rollout) for rollout in rollouts])

    store = FileStore(tmp_path / "store")
    trainer = threading.Thread(
        target=train,
        args=(recipe,),
        kwargs={"buffer": buffer.client(retry_s=120.0), "store": store, "stop": threading.Event()},
        daemon=True,
    )
    trainer.start()
    until("the run is paused", lambda: client.run().state == "paused" or not trainer.is_alive())
    paused = client.run()
    assert (paused.state, paused.step) == ("paused", 9)
    assert paused.state_reason is not None
    assert paused.state_reason.startswith("step 2-9: grad_spike: the gradient norm is 1e+06")
    # an operator looks, and goes back to where the guard went: the run stays paused, and the count of guards as it is
    assert client.checkpoints() == ["1-5"]
    client.rollback(RollbackRequest(step=8, reason="once more"))
    until("it is done", lambda: client.run().lineage == 3 or not trainer.is_alive())
    until("its weights are there", lambda: client.run().latest_version == "3-5" or not trainer.is_alive())
    info = client.run()
    assert (info.state, info.step, info.rollback, info.num_rollbacks) == ("paused", 5, None, 1)
    client.command("resume", RunCommand())
    trainer.join(timeout=DEADLINE_S)

    info = client.run()
    assert (info.state, info.step, info.parents) == ("done", 10, {1: "0-0", 2: "1-5", 3: "1-5"})
    lines = batch_entries(client.ledger().entries)
    assert [(line.lineage, line.step, line.skipped, line.abandoned) for line in lines] == [
        *((1, step, None, False) for step in range(1, 6)),
        (1, 6, None, True),
        (1, 7, "non_finite", True),
        *((2, step, None, True) for step in (6, 7, 8)),
        (2, 9, "grad_spike", True),
        *((3, step, None, False) for step in range(6, 11)),
    ]
    assert check_command(parse_arguments(["ledger", "check", "--url", buffer.url])) == 0
    assert "16 batches, 6 of them abandoned, 2 skipped, trainer starts: 3" in capsys.readouterr().out
    shown = status_lines(info, client.stats(), client.settings())
    went_off = [line.split()[0] for line in shown if " went off 1 times" in line]
    assert went_off == ["ess_collapse", "grad_spike", "log_ratio_drift", "non_finite"]
    assert "  batches skipped by the trainer: grad_spike 1, non_finite 1" in shown
