"""GET /v1/prompts and GET /v1/prompts/{prompt_id} over real HTTP."""

from __future__ import annotations

import httpx2
import pytest

from tba.api import Prompt
from tba.clients import BufferClient
from tba.errors import NotFoundError
from tba.versions import PolicyVersion
from tba.wire import encode_rollout
from tests.support.buffer import make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer


@pytest.fixture
def buffer(serve_buffer: ServeBuffer) -> BufferThread:
    """train-0: rewards 0, 1 and a pending one; train-1: 0.75; train-2: pending; train-3, heldout-0: nothing."""
    served = serve_buffer()
    client = served.client()
    client.upload_prompts([*make_prompts(4), Prompt(prompt_id="Other", task="math", text="İs ÄÖ?", split="heldout")])
    lineage = start_lineage(client)
    newer = PolicyVersion(lineage.lineage, 2)
    rollouts = [make_rollout(f"train-{i}", reward=reward) for i, reward in ((0, 0.0), (1, 0.75), (2, None))]
    rollouts += [make_rollout("train-0", reward=reward, version=newer) for reward in (1.0, None)]
    client.push([encode_rollout(rollout) for rollout in rollouts])
    return served


def ids(client: BufferClient, **query: object) -> list[str]:
    return [prompt.prompt_id for prompt in client.list_prompts(**query).prompts]  # pyright: ignore[reportArgumentType]


def test_a_prompt_is_shown_with_the_rewards_of_its_stored_rollouts(buffer: BufferThread) -> None:
    page = buffer.client().list_prompts(text_chars=3)
    assert (page.num_matching, page.next, len(page.prompts)) == (5, None, 5)
    first, last = page.prompts[0], page.prompts[-1]
    assert (first.prompt_id, first.task, first.split, first.data) == ("train-0", "addition", "train", None)
    assert buffer.client().list_prompts(text_chars=len('{"answer": 0}')).prompts[0].data == {"answer": 0}
    assert (first.text, first.text_cut, first.num_rollouts, first.num_scored) == ("0+0", True, 3, 2)
    assert (first.reward_mean, first.reward_min, first.reward_max) == (0.5, 0.0, 1.0)
    assert (page.prompts[2].num_rollouts, page.prompts[2].num_scored, page.prompts[2].reward_mean) == (1, 0, None)
    assert (last.num_rollouts, last.reward_mean, last.reward_min, last.reward_max) == (0, None, None, None)


def test_filters_and_orders(buffer: BufferThread) -> None:
    client = buffer.client()
    assert ids(client, split="heldout") == ["Other"]
    assert ids(client, task="addition") == [f"train-{i}" for i in range(4)]
    assert ids(client, task="unknown") == []
    assert ids(client, contains="oTHER") == ["Other"]  # the id
    assert ids(client, contains="äö") == ["Other"]  # the text
    assert ids(client, contains="2+2") == ["train-2"]
    assert ids(client, contains="TRAIN", split="heldout") == []
    assert ids(client, order="best") == ["train-1", "train-0", "train-2", "train-3", "Other"]
    for order in ("worst", "most"):
        assert ids(client, order=order) == ["train-0", "train-1", "train-2", "train-3", "Other"]


def test_pages_follow_one_another(buffer: BufferThread) -> None:
    client, seen, after = buffer.client(), [], 0
    while True:
        page = client.list_prompts(order="best", task="addition", limit=3, after=after)
        assert page.num_matching == 4
        seen += [prompt.prompt_id for prompt in page.prompts]
        if page.next is None:
            break
        after = page.next
    assert seen == ["train-1", "train-0", "train-2", "train-3"]
    beyond = client.list_prompts(after=2**53)
    assert (beyond.prompts, beyond.next, beyond.num_matching) == ([], None, 5)


def test_one_prompt_is_shown_whole_and_by_version(buffer: BufferThread) -> None:
    found = buffer.client().get_prompt("train-0")
    assert (found.text, found.text_cut, found.num_rollouts, found.reward_mean) == ("0+0=", False, 3, 0.5)
    assert [version.model_dump() for version in found.by_version] == [
        {"version": "0-0", "num_rollouts": 1, "num_scored": 1, "reward_mean": 0.0},
        {"version": "1-2", "num_rollouts": 2, "num_scored": 1, "reward_mean": 1.0},
    ]
    assert buffer.client().get_prompt("train-3").by_version == []


ODD_IDS = ["a/b", "/", "a//b/", "..", "../run", ".", "a b", "a?b=c", "a#b", "a%2Fb", "ü/ﬁ€😀", "x" * 256]


def test_every_id_that_can_be_uploaded_can_be_asked_for(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    client.upload_prompts([Prompt(prompt_id=prompt_id, task="t", text=f"of {prompt_id}") for prompt_id in ODD_IDS])
    for prompt_id in ODD_IDS:
        found = client.get_prompt(prompt_id)
        assert (found.prompt_id, found.text) == (prompt_id, f"of {prompt_id}")
        with pytest.raises(NotFoundError, match="was never uploaded"):
            client.get_prompt(f"-{prompt_id}"[:256])


def test_queries_that_cannot_be_meant_name_the_parameter(buffer: BufferThread) -> None:
    queries = [("order", "median"), ("limit", "101"), ("after", "-1"), ("contains", ""), ("contains", "x" * 201)]
    wrong = [(f"?{said}={value}", said) for said, value in [*queries, ("text_chars", "10001")]]
    for query, said in [*wrong, (f"/{'x' * 257}", "prompt_id")]:
        reply = httpx2.get(f"{buffer.url}/v1/prompts{query}", timeout=60)
        assert (reply.status_code, said in reply.json()["detail"]) == (422, True), query
