"""`tba buffer seed`: responses of a file become rollouts; a wrong row pushes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tba.versions import START
from tba_cli.prompts.reader import prompts_of
from tests.support.scored_buffer import stored_rollouts
from tests.support.searcher_world import TIMEOUT_S, World, start_world
from tests.support.tiny_model import EOS_ID, make_tiny_model

TEMPERATURE = 0.7


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    model = make_tiny_model(tmp_path / "model", 0, tied=True)
    world = start_world(
        tmp_path,
        model,
        num_train=0,
        num_heldout=0,
        data={"generator": "addition", "num_train": 4, "num_heldout": 2},
        objective={"preset": "tb"},
    )
    world.client.upload_prompts(prompts_of(world.recipe))
    yield world
    world.stop()


def seed(world: World, *rows: Any, sets: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = world.recipe_path.parent / "rows.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    command = [sys.executable, "-m", "tba_cli.main", "buffer", "seed", str(path), "--config", str(world.recipe_path)]
    sets = (f"model.policy_temperature={TEMPERATURE}", *sets)
    return subprocess.run(
        [*command, *(part for item in sets for part in ("--set", item))],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_responses_of_a_file_are_stored_once_with_the_log_probs_of_the_starting_model(
    world: World, tmp_path: Path
) -> None:
    prompts = [prompt for prompt in prompts_of(world.recipe) if prompt.split == "train"]
    rows = [
        {"prompt_id": prompts[0].prompt_id, "response": "41", "reward": 0.5},
        {"prompt_id": prompts[1].prompt_id, "response": "7+2"},
    ]
    done = seed(world, *rows)
    assert (done.returncode, done.stdout) == (0, "2 rollouts: 2 new\n"), done.stderr
    assert seed(world, *rows).stdout == "2 rollouts: 2 duplicate\n"
    grown = seed(world, *rows, {"prompt_id": prompts[2].prompt_id, "response": "4" * 9})
    assert (grown.returncode, grown.stdout) == (0, "3 rollouts: 2 duplicate, 1 new\n"), grown.stderr

    stored = {rollout.prompt_id: rollout for rollout in stored_rollouts(world.stack.redis).values()}
    scored, pending = stored[prompts[0].prompt_id], stored[prompts[1].prompt_id]
    assert (scored.reward, scored.reward_version, scored.version) == (0.5, "seed-file", START)
    assert (pending.reward, pending.reward_status) == (None, "pending")
    assert pending.response_tokens[-1] == EOS_ID
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = np.concatenate([pending.prompt_tokens, pending.response_tokens]).astype(np.int64)
    with torch.inference_mode():
        logits = model(torch.tensor(ids)[None]).logits[0, len(pending.prompt_tokens) - 1 : -1] / TEMPERATURE
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(pending.response_tokens.astype(np.int64))[:, None])
    np.testing.assert_allclose(pending.sampler_logprobs, expected[:, 0].numpy(), atol=1e-4)


def test_a_wrong_row_or_an_objective_that_needs_the_behaviour_policy_pushes_nothing(world: World) -> None:
    prompt_id = next(prompt.prompt_id for prompt in prompts_of(world.recipe) if prompt.split == "train")
    good = {"prompt_id": prompt_id, "response": "1"}
    wrong = {
        "line 2: prompt_id is missing, and the recipe has 4 train prompts": {"response": "1"},
        "line 2: 'nobody' is not a train prompt": {"prompt_id": "nobody", "response": "1"},
        "line 2: its response has 81 tokens, and the recipe's searchers take 12": {**good, "response": "1" * 80},
        "line 2: Object contains unknown field `text`": {**good, "text": "1"},
    }
    for sentence, row in wrong.items():
        done = seed(world, good, row)
        assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    done = seed(world, good, sets=("objective.preset=grpo",))
    assert (done.returncode, "uses the log-probs of the policy that wrote a rollout" in done.stderr) == (2, True)
    assert not stored_rollouts(world.stack.redis)
