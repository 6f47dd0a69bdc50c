"""Delivery against a real buffer: a rollout that is too large takes no other rollout with it."""

from __future__ import annotations

from pathlib import Path

from tba_searcher.delivery import Delivery
from tba_searcher.status import Status
from tba_searcher.text import TextCodec
from tba_searcher.waits import Waits

from tba.clients import RewardClient
from tba.config import parse_recipe
from tba.wire import encode_rollout
from tests.support.buffer import make_prompts, make_rollout
from tests.support.buffer_fixtures import ServeBuffer, redis, serve_buffer  # noqa: F401
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
