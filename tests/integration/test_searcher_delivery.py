"""Delivery against a real buffer: a rollout that is too large takes no other rollout with it."""

from __future__ import annotations

from pathlib import Path

from tba_searcher.delivery import Delivery
from tba_searcher.evaluating import Measures
from tba_searcher.status import Status
from tba_searcher.text import TextCodec
from tba_searcher.visits import Visit
from tba_searcher.waits import Waits

from tba.api import EvalResult
from tba.clients import RewardClient
from tba.config import parse_recipe
from tba.versions import START
from tba.wire import encode_rollout
from tests.support.buffer import make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer, later, redis, serve_buffer  # noqa: F401
from tests.support.leasing import lease, request_eval
from tests.support.tiny_model import make_tiny_tokenizer


async def test_a_rollout_over_the_body_limit_is_counted_and_the_others_arrive(
    tmp_path: Path,
    serve_buffer: ServeBuffer,  # noqa: F811
):
    limit_bytes = 64 * 1024
    served = serve_buffer(buffer={"max_body_bytes": limit_bytes})
    client = served.client()
    client.upload_prompts(make_prompts(1))
    make_tiny_tokenizer().save_pretrained(tmp_path)
    # the searcher believes in a larger limit than the buffer has: cutting by bytes alone cannot save it
    document = served.recipe.model_dump(mode="json")
    document["buffer"]["max_body_bytes"] = 4 * limit_bytes
    status = Status(searcher_id="s", run="test", waits=Waits())
    delivery = Delivery(
        parse_recipe(document, where="test"),
        buffer=client,
        reward=RewardClient("http://127.0.0.1:1", retry_s=0),
        codec=TextCodec(tmp_path),
        measures=Measures(reference_sums=None, embedder=None),
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
    tmp_path: Path,
    serve_buffer: ServeBuffer,  # noqa: F811
):
    served = serve_buffer()
    client = served.client()
    client.upload_prompts(make_prompts(1, 3))
    info = request_eval(client, start_lineage(client), timeout_s=1000.0)
    (item,) = lease(client, 1).leases
    later(client, 1001.0)
    assert client.get_eval(info.eval_id).state == "expired"
    make_tiny_tokenizer().save_pretrained(tmp_path)
    status = Status(searcher_id="s", run="test", waits=Waits())
    delivery = Delivery(
        served.recipe,
        buffer=client,
        reward=RewardClient("http://127.0.0.1:1", retry_s=0),
        codec=TextCodec(tmp_path),
        measures=Measures(reference_sums=None, embedder=None),
        reference=None,
        status=status,
    )
    result = EvalResult(lease_id=item.lease_id, rewards=[1.0] * 2, num_response_tokens=[5] * 2)
    await delivery._report([(Visit(lease=item, prompt_tokens=(1,), pinned=START), result)])
    assert status.counts["evals_reported"] == 0
    assert client.get_eval(info.eval_id).state == "expired"
