"""Delivery against a real buffer: a rollout that is too large takes no other rollout with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_searcher.engines.engine import Completion
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.generation.delivery import Delivery
from tba_searcher.generation.evaluation_results import ResultBuilder
from tba_searcher.generation.status import SearcherStatus, WaitRegistry
from tba_searcher.generation.visits import Visit

from tba.api import EvalResult, Lease, ScoreItem, ScoreResult
from tba.clients import BufferClient, RewardClient
from tba.config import parse_recipe
from tba.versions import START
from tba.wire import Sampling, VersionSpan, encode_rollout
from tests.support.buffer import make_prompts, make_recipe, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer, later
from tests.support.leasing import lease, request_eval
from tests.support.reward_server import RewardServer
from tests.support.tiny_model import make_tiny_tokenizer


async def test_a_rollout_over_the_body_limit_is_counted_and_the_others_arrive(
    tmp_path: Path, serve_buffer: ServeBuffer
):
    limit_bytes = 64 * 1024
    served = serve_buffer(buffer={"max_body_bytes": limit_bytes})
    client = served.client()
    client.upload_prompts(make_prompts(1))
    make_tiny_tokenizer().save_pretrained(tmp_path)
    # the searcher believes in a larger limit than the buffer has: cutting by bytes alone cannot save it
    document = served.recipe.model_dump(mode="json")
    document["buffer"]["max_body_bytes"] = 4 * limit_bytes
    status = SearcherStatus(searcher_id="s", run="test", waits=WaitRegistry())
    delivery = Delivery(
        parse_recipe(document, where="test"),
        buffer=client,
        reward=RewardClient("http://127.0.0.1:1", retry_s=0),
        codec=TextCodec(tmp_path),
        results=ResultBuilder(reference_sums=None, embedder=None),
        reference=None,
        status=status,
    )
    small = [encode_rollout(make_rollout()) for _ in range(5)]
    large = encode_rollout(make_rollout(num_tokens=limit_bytes // 8))
    status.num_unpushed = 6
    await delivery._push([*small[:2], large, *small[2:]])
    assert client.stats().num_rollouts == 5
    assert status.counts["rollouts_pushed"] == 5
    assert status.counts["rollouts_refused"] == 1
    assert status.num_unpushed == 0


async def test_results_of_an_evaluation_that_has_expired_are_given_up_and_the_searcher_goes_on(
    tmp_path: Path, serve_buffer: ServeBuffer
):
    served = serve_buffer()
    client = served.client()
    client.upload_prompts(make_prompts(1, 3))
    info = request_eval(client, start_lineage(client), timeout_s=1000.0)
    (item,) = lease(client, 1).leases
    later(client, 1001.0)
    assert client.get_eval(info.eval_id).state == "expired"
    make_tiny_tokenizer().save_pretrained(tmp_path)
    status = SearcherStatus(searcher_id="s", run="test", waits=WaitRegistry())
    delivery = Delivery(
        served.recipe,
        buffer=client,
        reward=RewardClient("http://127.0.0.1:1", retry_s=0),
        codec=TextCodec(tmp_path),
        results=ResultBuilder(reference_sums=None, embedder=None),
        reference=None,
        status=status,
    )
    result = EvalResult(lease_id=item.lease_id, rewards=[1.0] * 2, num_response_tokens=[5] * 2)
    await delivery._report([(Visit(lease=item, prompt_tokens=(1,), pinned=START), result)])
    assert status.counts["evals_reported"] == 0
    assert client.get_eval(info.eval_id).state == "expired"


def scoring_delivery(folder: Path, reward: RewardServer, **section: Any) -> Delivery:
    """One that scores; what it would push stays in its queue."""
    make_tiny_tokenizer().save_pretrained(folder)
    return Delivery(
        make_recipe(reward={"url": reward.url, **section}),
        buffer=BufferClient("http://127.0.0.1:1", retry_s=0),
        reward=RewardClient(reward.url, retry_s=0),
        codec=TextCodec(folder),
        results=ResultBuilder(reference_sums=None, embedder=None),
        reference=None,
        status=SearcherStatus(searcher_id="s", run="test", waits=WaitRegistry()),
    )


def score_items(number: int) -> list[ScoreItem]:
    return [ScoreItem(item_id=str(n), task="addition", prompt="p", response=f"r{n}") for n in range(number)]


async def test_what_is_refused_together_is_scored_in_halves(tmp_path: Path, reward: RewardServer) -> None:
    def refusal(items: list[dict[str, Any]]) -> tuple[int, dict[str, Any]] | None:
        is_refused = len(items) > 2 or any(item["item_id"] == "4" for item in items)
        return (413, {"detail": "too large"}) if is_refused else None

    reward.refusal = refusal
    delivery = scoring_delivery(tmp_path, reward)
    results = await delivery._request_scores(score_items(7))
    scored = [result.item_id if isinstance(result, ScoreResult) else result for result in results]
    assert scored[:4] + scored[5:] == ["0", "1", "2", "3", "5", "6"]
    assert "the reward service refused the request" in scored[4], "it alone is pending"


@pytest.mark.parametrize(("kind", "is_sent"), [("python", True), ("exact", False)])
async def test_a_python_function_gets_the_tokens_of_a_response(
    tmp_path: Path, reward: RewardServer, kind: str, is_sent: bool
) -> None:
    spec = {"kind": kind, **({"function": "tests.support.trl_rewards:num_tokens"} if kind == "python" else {})}
    delivery = scoring_delivery(tmp_path, reward, tasks={"addition": {"scorers": [spec]}})
    (prompt,) = make_prompts(1)
    item = Lease(
        lease_id="l",
        kind="train",
        visit_id="train-1",
        prompt=prompt,
        num_rollouts=1,
        temperature=1.0,
        expires_in_s=60.0,
    )
    visit = Visit(lease=item, prompt_tokens=(1,), pinned=None)
    visit.completions.append(
        Completion(
            request_id="train-1-0",
            response_tokens=np.array([5, 6, 7], np.int32),
            sampler_logprobs=np.zeros(3, np.float32),
            sampling=Sampling(temperature=1.0),
            finish_reason="length",
            version_spans=(VersionSpan(version=START, start=0, end=3),),
            started_at_s=0.0,
            finished_at_s=1.0,
        )
    )
    delivery.put(visit)
    await delivery._score([visit])
    assert reward.asked[0].get("response_tokens") == ([5, 6, 7] if is_sent else None)
