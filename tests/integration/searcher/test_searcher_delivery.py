"""The deliveries of a searcher: in time, late, at a drain, and at the end of a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.generation.delivery import Delivery
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.visits import Visit, num_round_visits
from tba_searcher.loop import IDLE_WAIT_S, ROUND_WAIT_S
from tba_searcher.service import Clients, Searcher
from tba_searcher.waits import WaitRegistry

from tba.api import (
    EvalResult,
    EvalResults,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    RunCommand,
    ScoreItem,
    ScoreResult,
    VersionRequest,
)
from tba.clients import BufferClient, RewardClient
from tba.config import Recipe, parse_recipe
from tba.errors import NotFoundError, UnavailableError
from tba.versions import START, PolicyVersion
from tba.wire import decode_rollout, encode_rollout
from tests.support.buffer import make_prompts, make_recipe, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer, later
from tests.support.leases import lease, request_eval
from tests.support.reward_server import Answer, RewardServer
from tests.support.searcher_loop import LoopWorld, start_loop_world
from tests.support.searcher_world import World, publish_version, sigterm, start_world
from tests.support.tiny_model import make_tiny_model, make_tiny_tokenizer
from tests.support.visits import make_completion, make_visit
from tests.support.waits import DEADLINE_S, until

# ---- Delivery against a real buffer ---------------------------------------------------------------------------------


def make_delivery(folder: Path, recipe: Recipe, buffer: BufferClient | None = None) -> Delivery:
    """One whose tasks do not run: what it has scored stays in its queue."""
    make_tiny_tokenizer().save_pretrained(folder)
    status = SearcherStatus(searcher_id="s1", run="test", waits=WaitRegistry())
    clients: dict[str, Any] = {"buffer": buffer or BufferClient("http://127.0.0.1:1", retry_s=0)}
    clients["reward"] = RewardClient(recipe.reward_url, retry_s=0)
    return Delivery(recipe, **clients, codec=TextCodec(folder), embedder=None, reference=None, status=status)


def scoring_delivery(folder: Path, reward: RewardServer, **section: Any) -> Delivery:
    return make_delivery(folder, make_recipe(reward={"url": reward.url, **section}))


async def test_a_rollout_over_the_body_limit_is_counted_and_the_others_arrive(tmp_path, serve_buffer: ServeBuffer):
    limit_bytes = 64 * 1024
    served = serve_buffer(buffer={"max_body_bytes": limit_bytes})
    client = served.client()
    client.upload_prompts(make_prompts(1))
    # the searcher believes in a larger limit than the buffer has: cutting by bytes alone cannot save it
    document = served.recipe.model_dump(mode="json")
    document["buffer"]["max_body_bytes"] = 4 * limit_bytes
    delivery = make_delivery(tmp_path, parse_recipe(document, where="test"), client)
    status = delivery._status
    small = [encode_rollout(make_rollout()) for _ in range(5)]
    large = encode_rollout(make_rollout(num_tokens=limit_bytes // 8))
    status.num_unpushed = 6
    await delivery._push([*small[:2], large, *small[2:]])
    assert client.stats().num_rollouts == 5
    assert status.counts["rollouts_pushed"] == 5
    assert status.counts["rollouts_refused"] == 1
    assert status.num_unpushed == 0


async def test_results_of_an_evaluation_that_has_expired_are_given_up_and_the_searcher_continues(
    tmp_path: Path, serve_buffer: ServeBuffer
):
    served = serve_buffer()
    client = served.client()
    client.upload_prompts(make_prompts(1, 3))
    info = request_eval(client, start_lineage(client))
    (item,) = lease(client, 1).leases
    later(client, 1001.0)
    assert client.get_eval(info.eval_id).state == "expired"
    delivery = make_delivery(tmp_path, served.recipe, client)
    status = delivery._status
    result = EvalResult(lease_id=item.lease_id, rewards=[1.0] * 2, num_response_tokens=[5] * 2)
    await delivery._report([(Visit(lease=item, prompt_tokens=(1,), pinned=START), result)])
    assert status.counts["evals_reported"] == 0
    assert client.get_eval(info.eval_id).state == "expired"


async def test_results_of_an_evaluation_over_the_body_limit_are_halved_and_only_what_is_too_large_alone_is_lost(
    tmp_path: Path, serve_buffer: ServeBuffer
) -> None:
    served = serve_buffer(buffer={"max_body_bytes": 4096}, eval={"num_samples": 128})
    client = served.client()
    client.upload_prompts(make_prompts(1, 3))
    info = request_eval(client, start_lineage(client))
    leases = lease(client, 6).leases
    delivery = make_delivery(tmp_path, served.recipe, client)
    status = delivery._status
    long, items = 1 / 3, []
    for item in sorted(leases, key=lambda item: item.num_rollouts):
        num = item.num_rollouts
        # a sample of 128 has 3 KB: no two of them fit; with long rewards too, it does not fit alone
        reward = long if len(items) == 5 else 1.0
        result = EvalResult(lease_id=item.lease_id, rewards=[reward] * num, num_response_tokens=[10**15] * num)
        items.append((Visit(lease=item, prompt_tokens=(1,), pinned=START), result))
    await delivery._report(items)
    assert (status.counts["evals_reported"], status.counts["evals_refused"]) == (5, 1)
    assert client.get_eval(info.eval_id).num_done == 2
    await delivery._report(items)  # as after an answer that was lost
    assert client.get_eval(info.eval_id).num_done == 2


async def test_results_of_an_evaluation_that_nobody_knows_are_reported_once(tmp_path, reward, monkeypatch) -> None:
    delivery, calls = scoring_delivery(tmp_path, reward), []

    def unknown(eval_id: str, body: EvalResults) -> None:
        calls.append(eval_id)
        raise NotFoundError("no such lease")

    monkeypatch.setattr(delivery._buffer, "eval_results", unknown)
    results = [EvalResult(lease_id=f"l{n}", rewards=[1.0], num_response_tokens=[5]) for n in range(64)]
    await delivery._report_results("e", str(START), results)
    assert (calls, delivery._status.counts["evals_refused"]) == (["e"], 64)


async def test_an_evaluation_counts_answers_that_are_why_they_have_no_score(tmp_path, reward: RewardServer) -> None:
    delivery = scoring_delivery(tmp_path, reward)
    reward.score = lambda item: {"r0": 1.0, "r1": "exception", "r2": "too_long", "r3": "timeout"}[item["response"]]
    scores = await delivery._request_scores(score_items(4))
    visit = make_visit("e", num_rollouts=4, pinned=START)
    visit.completions += [make_completion(f"train-1-0/{n}", [5], "length") for n in range(4)]
    found = await delivery._evaluation_result(visit, [""] * 4, scores)
    assert (found.rewards, found.num_wrong, found.num_raised) == ([1.0, None, None, None], 1, 1)
    del visit.completions[1:]
    for number, expected in enumerate([(None, None), (None, 1), (1, None), (None, None)]):
        greedy = await delivery._evaluation_result(visit, [""], scores[number : number + 1])
        assert (greedy.num_wrong, greedy.num_raised) == expected


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
async def test_a_python_function_gets_the_tokens_of_a_response(tmp_path, reward, kind: str, is_sent: bool) -> None:
    spec = {"kind": kind, **({"function": "tests.support.trl_rewards:num_tokens"} if kind == "python" else {})}
    delivery = scoring_delivery(tmp_path, reward, tasks={"addition": {"scorers": [spec]}})
    await delivery._score([one_visit(delivery)])
    assert reward.asked[0].get("response_tokens") == ([5, 6, 7] if is_sent else None)


@pytest.mark.parametrize(
    ("answer", "status", "parts"),
    [(10.0, "scored", {"format": 1.0, "exact": 5.0}), ("timeout", "failed", None), ("unreachable", "pending", None)],
)
async def test_a_rollout_carries_the_parts_of_its_reward(tmp_path, reward: RewardServer, answer, status, parts) -> None:
    reward.score, reward.parts = lambda item: answer, {"format": 1.0, "exact": 5.0}
    delivery = scoring_delivery(tmp_path, reward)
    await delivery._score([one_visit(delivery)])
    (payload,) = delivery._scored.get_nowait().payloads
    rollout = decode_rollout(payload)
    assert (rollout.reward_status, rollout.reward_parts) == (status, parts)
    counts = {name: delivery._status.counts[f"scores_{name}"] for name in ("pending", "failed")}
    assert counts == {name: int(name == status) for name in counts}


async def test_a_prompt_that_a_scorer_hangs_on_keeps_no_other_waiting_and_is_named(
    tmp_path: Path, reward: RewardServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tba_searcher.generation.delivery.MIN_SLOW_S", 0.2)
    goes_on = threading.Event()

    def score(item: dict[str, Any]) -> Answer:
        if item["prompt"] != make_prompts(3)[1].text:
            return 1.0
        return "timeout" if goes_on.wait(DEADLINE_S) else "exception"

    reward.score = score
    delivery = scoring_delivery(tmp_path, reward)
    delivery._longest_s = 0.0
    for number in range(3):
        one_visit(delivery, number)
    tasks = [asyncio.create_task(job()) for job in (delivery.score_forever, *[delivery.score_alone_forever] * 8)]
    await asyncio.to_thread(until, "the others are scored", lambda: delivery._scored.qsize() == 2)
    assert delivery.lease_ids == {"l-0", "l-1", "l-2"}, "none is pushed yet"
    goes_on.set()
    await asyncio.to_thread(until, "it has failed", lambda: delivery._scored.qsize() == 3)
    scored = [delivery._scored.get_nowait() for _ in range(3)]
    statuses = {each.visit.lease.lease_id: decode_rollout(each.payloads[0]).reward_status for each in scored}
    assert statuses == {"l-0": "scored", "l-1": "failed", "l-2": "scored"}
    assert f"prompt_id={make_prompts(3)[1].prompt_id}" in capsys.readouterr().out
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize(("item_timeout_s", "expected_s"), [(1.0, 30.0), (270.0, 150.0)])
async def test_scores_are_first_asked_for_alone_after_half_of_the_deadline_of_a_request(
    tmp_path: Path, reward: RewardServer, monkeypatch: pytest.MonkeyPatch, item_timeout_s: float, expected_s: float
) -> None:
    tasks = {"judged": {"scorers": [{"kind": "format", "pattern": "a", "timeout_s": item_timeout_s}]}}
    delivery, waited = scoring_delivery(tmp_path, reward, tasks=tasks), list[float | None]()
    in_time = delivery._scores_in_time

    async def record(items: list[ScoreItem], slow_s: float | None) -> list[ScoreResult | str] | None:
        waited.append(slow_s)
        return await in_time(items, slow_s)

    monkeypatch.setattr(delivery, "_scores_in_time", record)
    for number in range(2):
        await delivery._score([one_visit(delivery, number)])
    assert waited == [expected_s, pytest.approx(0.9 * expected_s)]


async def test_an_evaluation_whose_request_got_no_answer_because_of_another_is_asked_alone(tmp_path, reward) -> None:
    """As an endpoint does that hangs on one item of a batch: none of the batch has a score."""
    hung = make_prompts(2)[1].text

    def score(item: dict[str, Any]) -> Answer:
        return "unreachable" if hung in {each["prompt"] for each in reward.requests[-1]} else 1.0

    reward.score = score
    delivery = scoring_delivery(tmp_path, reward)
    visits = [one_visit(delivery, number, pinned=START) for number in range(2)]
    await delivery._score(visits)
    assert delivery._scored.empty()
    for _ in visits:
        await delivery._score([delivery._alone.get_nowait()], alone=True)
    results = [delivery._scored.get_nowait().result for _ in visits]
    assert [None if result is None else result.rewards for result in results] == [[1.0], [None]]


def one_visit(delivery: Delivery, number: int = 0, pinned: PolicyVersion | None = None) -> Visit:
    prompt = make_prompts(number + 1)[number]
    visit = make_visit(f"l-{number}", prompt=prompt, num_rollouts=1, pinned=pinned, visit_id="train-1")
    visit.completions.append(make_completion("train-1-0", [5, 6, 7], "length"))
    delivery.put(visit)
    return visit


# ---- A searcher that is stopped returns every lease that it can, also those that are granted meanwhile --------------


MakeWorld = Callable[..., LoopWorld]


class HeldBuffer(BufferClient):
    """Grants leases, but holds back the replies until `answers` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.granted, self.answers = threading.Event(), threading.Event()
        self.is_away = False
        """The next call for leases fails."""
        self.num_asked = self.num_failing_returns = 0

    def lease(self, request: LeaseRequest) -> LeaseReply:
        self.num_asked += 1
        reply = super().lease(request)
        self.granted.set()
        self.answers.wait(DEADLINE_S)
        if self.is_away:
            raise UnavailableError("no answer")
        return reply

    def return_leases(self, request: LeaseReturn) -> None:
        """Give leases back, after so many that are lost on the way."""
        if self.num_failing_returns:
            self.num_failing_returns -= 1
            raise UnavailableError("no answer")
        super().return_leases(request)


@pytest.fixture
def make_world(tmp_path: Path, serve_buffer: ServeBuffer, reward: RewardServer, model: Path) -> MakeWorld:
    return lambda **searcher: start_loop_world(tmp_path, serve_buffer, reward, model, searcher=searcher)


def held(world: LoopWorld) -> HeldBuffer:
    buffer = HeldBuffer(world.served.url)
    world.loop._buffer = world.loop._leases._buffer = buffer
    return buffer


async def stopped_while_leases_are_granted(world: LoopWorld, buffer: HeldBuffer) -> asyncio.Task[None]:
    """The loop, which drains; the buffer has granted leases of which the searcher does not know yet."""
    task = asyncio.create_task(world.loop.run())
    await asyncio.to_thread(until, "leases", buffer.granted.is_set)
    assert world.client.stats().leases["open"] > 0
    world.stop.set()
    await asyncio.to_thread(until, "the drain", lambda: world.status.state != "running")
    await asyncio.wait({task}, timeout=0.5)  # one that did not wait for the answer would end now
    return task


async def test_a_request_waits_at_the_buffer_for_any_lease_while_idle_and_for_a_round_while_busy(make_world) -> None:
    world = make_world(drain_s=DEADLINE_S, num_slots=16)
    asked: list[LeaseRequest] = []

    class Recorded(BufferClient):
        def lease(self, request: LeaseRequest) -> LeaseReply:
            asked.append(request)
            return super().lease(request)

    world.loop._buffer = Recorded(world.served.url)
    task = asyncio.create_task(world.loop.run())
    await asyncio.to_thread(until, "a busy request", lambda: any(request.wait_s == ROUND_WAIT_S for request in asked))
    version = VersionRequest(version="1-0", token=world.lineage.token)
    world.client.announce_version(version)  # nobody has published it: only the news of it counts here
    await asyncio.to_thread(until, "the news", lambda: asked[-1].known_version == "1-0")
    world.stop.set()
    await task
    num_round = num_round_visits(world.served.recipe)
    assert num_round > 1
    assert (asked[0].min_leases, asked[0].wait_s, asked[0].known_version) == (1, IDLE_WAIT_S, "0-0")
    busy = [request for request in asked if request.wait_s == ROUND_WAIT_S]
    assert all(request.min_leases == min(num_round, request.max_leases) for request in busy)


async def test_leases_that_are_granted_while_it_drains_go_back(make_world: MakeWorld) -> None:
    world = make_world(drain_s=DEADLINE_S)
    buffer = held(world)
    task = await stopped_while_leases_are_granted(world, buffer)
    buffer.answers.set()
    await task
    stats = world.client.stats()
    assert stats.leases["open"] == 0
    assert stats.leases["returned"] == stats.leases["granted"] == world.status.counts["leases_returned"] > 0


async def test_a_drain_waits_for_an_answer_only_so_long_and_the_leases_expire(make_world: MakeWorld, capfd) -> None:
    world = make_world(drain_s=0.5)
    buffer = held(world)
    await (await stopped_while_leases_are_granted(world, buffer))
    buffer.answers.set()
    assert world.client.stats().leases["open"] > 0
    assert "lease request not answered; leases that it was granted expire" in capfd.readouterr().out


async def test_a_request_that_fails_while_it_drains_is_not_made_again(make_world: MakeWorld) -> None:
    world = make_world(drain_s=DEADLINE_S)
    buffer = held(world)
    task = await stopped_while_leases_are_granted(world, buffer)
    buffer.is_away = True
    buffer.answers.set()
    await task
    assert (world.status.state, buffer.num_asked) == ("ended", 1)


async def test_a_return_that_fails_at_the_start_of_a_drain_is_made_again_at_its_end(make_world: MakeWorld) -> None:
    world = make_world(drain_s=DEADLINE_S)
    buffer = held(world)
    buffer.answers.set()
    world.loop._next_requests = list  # leased visits are not begun
    task = asyncio.create_task(world.loop.run())
    await asyncio.to_thread(until, "leases", lambda: world.loop._queue.open_visits())
    buffer.num_failing_returns = 1
    world.stop.set()
    await task
    stats = world.client.stats()
    assert stats.leases["open"] == 0
    assert stats.leases["returned"] == stats.leases["granted"] > 0


async def test_a_searcher_that_is_stopped_while_it_starts_returns_what_it_is_granted(make_world, tmp_path) -> None:
    world = make_world()
    document = world.served.recipe.model_dump(mode="json")
    document["store"]["url"] = f"file://{tmp_path / 'store'}"
    document["searcher"]["drain_s"] = DEADLINE_S
    buffer, stop = HeldBuffer(world.served.url), asyncio.Event()
    nobody, recipe = RewardClient("http://127.0.0.1:1", retry_s=0), parse_recipe(document, where="test")
    clients = Clients(buffer=buffer, heartbeats=world.client, reward=nobody)
    searcher = Searcher(recipe, tmp_path / "searcher", searcher_id="s", clients=clients, stop=stop)
    task = asyncio.create_task(searcher.run())
    await asyncio.to_thread(until, "a lease", buffer.granted.is_set)
    assert world.client.stats().leases["open"] == 1
    stop.set()
    await asyncio.wait({task}, timeout=0.5)  # one that did not wait for the answer would end now
    buffer.answers.set()
    await task
    stats = world.client.stats()
    assert (stats.leases["open"], stats.leases["returned"]) == (0, 1)


# ---- `searcher.on_run_end = "wait"`: a searcher outlives its run without the model, and continues when the run does -


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    model = make_tiny_model(tmp_path / "model", 0, tied=True)
    world = start_world(tmp_path, model, searcher={"on_run_end": "wait"})
    yield world
    world.stop()


def test_a_searcher_waits_without_a_model_until_the_run_continues_and_drains_in_the_end(world, tmp_path) -> None:
    world.start_reward()
    process = world.start_searcher()
    world.until(lambda: world.client.stats().num_scored >= 8, "scored rollouts")
    world.client.command("done", RunCommand(token=world.lineage.token))

    world.until(lambda: (s := world.searcher()) is not None and s.state == "idle", "the idle searcher")
    world.until(lambda: [w.name for w in world.client.run().waits] == ["run-done"], "its wait")
    assert (s := world.searcher()) is not None
    assert (s.version, s.gauges["active_slots"]) == (None, 0)
    searchers = world.client.run().searchers
    assert searchers is not None
    assert searchers.alive == 1
    assert process.poll() is None

    num_before = world.client.stats().num_rollouts
    lineage = start_lineage(world.client, mark=False)
    publish_version(world.versions, tmp_path / "model", PolicyVersion(lineage.lineage, 4))
    world.client.announce_version(VersionRequest(version=f"{lineage.lineage}-4", token=lineage.token))
    world.until(lambda: world.client.stats().num_rollouts >= num_before + 8, "rollouts of the resumed run")
    # its first lease may come before the announcement
    world.until(lambda: (s := world.searcher()) and s.version == f"{lineage.lineage}-4", "the announced version")
    assert (s := world.searcher()) is not None
    assert s.state == "running"

    world.client.command("fail", RunCommand(token=lineage.token))
    world.until(lambda: (s := world.searcher()) is not None and s.state == "idle", "the idle searcher")
    assert sigterm(process) == 0
    assert "Traceback" not in world.log()
