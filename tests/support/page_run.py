"""A run with data for every part of the live page; one response text contains HTML markup."""

from __future__ import annotations

import numpy as np

from tba.api import AckRequest, BatchRequest, TrainedRollouts
from tba.clients import BufferClient
from tba.versions import START, PolicyVersion
from tba.wire import Heartbeat, Rollout, VersionSpan, encode_rollout
from tests.support.buffer import make_prompts, make_rollout, start_lineage

NUM_STEPS = 12
ATTACK = (
    "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>\u202e</pre><b>bold</b>"
)


def rollouts(step: int) -> list[Rollout]:
    """Return four rollouts of each of three prompts; rewards grow with the step and begin anew every five steps."""
    return [
        make_rollout(
            f"train-{prompt}",
            reward=float(i < step % 5),
            version=PolicyVersion(1, step) if step else START,
            response_text=ATTACK if (step, prompt, i) == (0, 0, 0) else f"answer {i} of step {step}",
            finish_reason="length" if i == 3 else "stop",
            visit_id=f"visit-{step}-{prompt}",
        )
        for prompt in range(3)
        for i in range(4)
    ]


def train(client: BufferClient) -> None:
    """Push, draw and ack NUM_STEPS steps with metrics, then push a failed rollout and a heartbeat for the page."""
    client.upload_prompts(make_prompts(4, 2))
    lineage = start_lineage(client)
    for step in range(NUM_STEPS):
        client.push([encode_rollout(one) for one in rollouts(step)])
        batch = client.draw_batch(
            BatchRequest(trainer_id="trainer-1", lineage=1, step=step + 1, token=lineage.token, wait_s=10)
        )
        drawn = batch.rollouts
        metrics: dict[str, float | None] = {
            "reward_mean": step / NUM_STEPS,
            "ess": 0.9,
            "kl_to_ref": 0.1 * step,
            "entropy": 1.0,
            "step_s": 0.2,
        }
        metrics |= {"wait_s": 0.05, "grad_norm": 1.5, "loss": -0.1, "policy_age_mean": 1.0, "policy_age_max": 3.0}
        request = AckRequest(
            lineage=1,
            step=step + 1,
            token=lineage.token,
            metrics=metrics,
            policy_ages=[step - one.version.step for one in drawn],
            num_tokens=sum(len(one.response_tokens) for one in drawn),
            trained=TrainedRollouts(
                rollout_ids=[one.rollout_id.hex() for one in drawn],
                advantages=[0.25 if one.reward else -0.75 for one in drawn],
                weights=[1.0] * len(drawn),
            ),
        )
        client.ack(batch.batch_id, request)
    mixed = make_rollout(
        "train-3",
        reward=None,
        version_spans=(VersionSpan.of(PolicyVersion(1, 1), 0, 2), VersionSpan.of(PolicyVersion(1, 2), 2, 3)),
        sampler_logprobs=np.array([-0.1, -2.5, -7.0], dtype=np.float32),
    ).with_failure("timeout: the scorer took 5 s")
    client.push([encode_rollout(mixed)])
    client.heartbeat(
        Heartbeat(
            component_id="searcher-7",
            kind="searcher",
            run="test",
            state="generating",
            version=PolicyVersion(1, 1),
            wait=None,
            gauges={"tokens_per_s": 1234.0},
        )
    )
