"""Visits, evaluations and the engine thread of a searcher."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tba_searcher.engines.engine import Completion, EngineDiedError, EngineError
from tba_searcher.generation import engine_thread
from tba_searcher.generation.engine_thread import EngineStep, EngineThread, run_step
from tba_searcher.generation.evaluation_results import (
    Embedder,
    cosine_distances,
    distinct_share,
    failed_result,
    result_of,
)
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.visits import LeaseManager, Visit, WorkQueue, num_round_visits
from tba_searcher.waits import WaitRegistry, retry_until, sleep_until
from transformers import AutoTokenizer, BertModel

from tba.api import MAX_LEASE_IDS, LeaseRenewal, LeaseRenewalReply, LeaseReturn
from tba.config.searcher import SearcherSection
from tba.errors import ConfigError, DigestError, UnavailableError
from tba.evaluation.statistics import mean_of_pairs
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion
from tba.wire.sequences import FinishReason
from tests.support.buffer import make_recipe
from tests.support.tiny_encoder import make_tiny_encoder
from tests.support.visits import make_completion, make_visit
from tests.support.waits import until

# ---- The engine's thread --------------------------------------------------------------------------------------------


V1 = PolicyVersion(1, 4)


def loaded(version: PolicyVersion) -> LocalVersion:
    manifest: Any = SimpleNamespace(version=str(version))
    return LocalVersion(version, (), manifest)


OLD, NEW = loaded(START), loaded(V1)
NO_ERRORS: Any = MappingProxyType({})


class ScriptedEngine:
    """One active request; each test decides what its calls do."""

    num_active, num_waiting = 1, 0

    def __init__(self, *, cannot_load: Any = (), cannot_verify: bool = False, fails: Any = NO_ERRORS) -> None:
        """`cannot_load`: versions; `cannot_verify`: is no version the right one; `fails`: the error of its check."""
        self.proceed, self.loaded, self.is_closed = threading.Event(), list[PolicyVersion](), False
        self._cannot_load, self._cannot_verify, self._fails = cannot_load, cannot_verify, fails

    def step(self) -> list[Completion]:
        self.proceed.wait()
        return []

    def load_weights(self, paths: Sequence[Path], version: PolicyVersion) -> None:
        self.loaded.append(version)
        if version in self._cannot_load:
            raise EngineError(f"no room for {version}")

    def verify(self, manifest: Any) -> None:
        if self._cannot_verify:
            raise DigestError("wrong digest")
        if self.loaded[-1] in self._fails:
            raise self._fails[self.loaded[-1]]

    def close(self) -> None:
        self.is_closed = True


async def test_a_step_that_never_comes_back_has_a_name_and_ends_at_its_deadline(monkeypatch) -> None:
    monkeypatch.setattr(engine_thread, "LONG_STEP_S", 0.02)
    waits, engine = WaitRegistry(), ScriptedEngine()
    thread = EngineThread(waits, timeout_s=0.4)
    asking = asyncio.ensure_future(thread.run(engine, EngineStep(None, []), OLD))  # pyright: ignore[reportArgumentType]
    while (wait := waits.current()) is None:
        assert not asking.done()
        await asyncio.sleep(0)  # every turn of the event loop, so that the wait cannot pass unseen
    assert wait.name == "engine-step"
    died = (await asking).died
    assert isinstance(died, EngineDiedError)
    assert "wait engine-step: the engine did not come back for 0.4 s" in str(died)
    assert waits.current() is None
    monkeypatch.setattr(engine_thread, "CLOSE_S", 0.02)
    await thread.close(engine)  # pyright: ignore[reportArgumentType]
    assert not engine.is_closed
    engine.proceed.set()


async def test_a_closed_engine_is_closed_in_its_own_thread_after_the_step_in_progress() -> None:
    engine = ScriptedEngine()
    thread = EngineThread(WaitRegistry(), timeout_s=60)
    step = asyncio.ensure_future(thread.run(engine, EngineStep(None, []), OLD))  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(thread.close(engine))  # pyright: ignore[reportArgumentType]
    engine.proceed.set()
    await closing
    assert engine.is_closed
    assert (await step).died is None


@pytest.mark.parametrize(
    ("broken", "refused", "died", "loaded"),
    [
        ({}, None, None, [V1]),
        ({"cannot_load": [V1]}, "no room for 1-4", None, [V1, START]),
        ({"cannot_verify": True}, "wrong digest", None, [V1, START]),
        ({"fails": {V1: IndexError("out of range")}}, "1-4: .* checked .IndexError: out of", None, [V1, START]),
        ({"fails": {V1: EngineDiedError("crashed")}}, "1-4: .* checked .EngineDiedError: crashed", None, [V1, START]),
        ({"fails": dict.fromkeys([V1, START], RuntimeError("device-side assert"))}, None,
         "1-4 was refused .*0-0 cannot be loaded again: device-side assert", [V1, START]),
        ({"cannot_load": [V1, START]}, None, "1-4 was refused .*no room for 1-4.*0-0 cannot be", [V1, START]),
        ({"cannot_load": [START], "cannot_verify": True}, None, "wrong digest.*0-0 cannot be loaded", [V1, START]),
    ],
)  # fmt: skip
def test_weights_of_no_use_give_way_to_the_old_ones_or_else_the_engine_is_dead(broken, refused, died, loaded) -> None:
    engine = ScriptedEngine(**broken)
    engine.proceed.set()
    engine.num_active = 0
    result = run_step(engine, EngineStep(NEW, []), OLD)  # pyright: ignore[reportArgumentType]
    assert engine.loaded == loaded
    for found, wanted in ((result.swap_error, refused), (result.died, died)):
        assert (found is None) == (wanted is None)
        assert found is None or re.search(str(wanted), str(found))


# ---- The searcher's measurements of evaluation samples --------------------------------------------------------------


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def complete_visit(kind: str, *responses: Sequence[int], finish_reason: FinishReason = "stop") -> Visit:
    visit = make_visit(kind=kind, num_rollouts=len(responses), pinned=START)
    visit.completions = [make_completion("", response, finish_reason) for response in responses]
    return visit


def test_distinct_counts_different_n_grams_over_all_responses_together() -> None:
    responses = [tokens(1, 2, 1, 2), tokens(1, 2), tokens(7)]
    assert distinct_share(responses, 1) == 3 / 7
    assert distinct_share(responses, 2) == 2 / 4  # 12 21 12, 12; none crosses from one response into the next
    assert distinct_share(responses, 3) == 1.0
    assert distinct_share([tokens(1), tokens()], 2) is None


def mean_cosine_distance(embeddings: torch.Tensor) -> float | None:
    return mean_of_pairs(cosine_distances(embeddings).numpy())[0]


def test_the_distance_is_zero_for_equal_and_one_for_orthogonal_directions() -> None:
    assert mean_cosine_distance(torch.tensor([[1.0, 2.0], [2.0, 4.0]])) == pytest.approx(0.0, abs=1e-12)
    three = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    assert mean_cosine_distance(three) == pytest.approx((1 + 2 + 1) / 3)
    assert mean_cosine_distance(torch.ones(1, 4)) is None


def test_empty_texts_are_equal_to_each_other_and_far_from_all_others() -> None:
    empty, some = torch.zeros(2), torch.tensor([1.0, 2.0])
    assert mean_cosine_distance(torch.stack([empty, empty])) == 0.0
    assert mean_cosine_distance(torch.stack([empty, some])) == 1.0
    assert mean_cosine_distance(torch.stack([empty, empty, some])) == pytest.approx(2 / 3)


def test_diversity_is_that_of_the_samples_and_greedy_completions_have_none() -> None:
    visit = complete_visit("sample", [4, 5, 1], [4, 1])
    result = result_of(visit, ["ab", "a"], [1.0, None], embedder=None)
    assert (result.rewards, result.num_response_tokens) == ([1.0, None], [3, 2])
    assert (result.distinct_1, result.distinct_2, result.distinct_3) == (2 / 3, 1.0, None)  # 4 5, 4: ends left out
    assert result_of(complete_visit("greedy", [4, 1]), ["a"], [1.0], embedder=None).distinct_1 is None


def test_a_response_cut_at_its_length_limit_counts_with_all_its_tokens() -> None:
    visit = complete_visit("sample", [4, 5], finish_reason="length")
    result = result_of(visit, ["ab"], [0.0], embedder=None)
    assert (result.distinct_1, result.distinct_2) == (1.0, 1.0)


def test_a_prompt_that_cannot_be_sampled_is_reported_as_unknown() -> None:
    result = failed_result(complete_visit("sample", [1], [1]))
    assert (result.rewards, result.num_response_tokens, result.distinct_1) == ([None, None], [0, 0], None)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder"))


def test_an_encoder_lacks_no_weight_but_those_of_a_pooler(encoder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(encoder, tmp_path / "encoder"))
    path = folder / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if not name.startswith("pooler.")}
    save_file(tensors, path, metadata={"format": "pt"})
    Embedder(folder)
    del tensors["encoder.layer.0.attention.self.query.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights of a BertModel: encoder\.layer\.0\.attention\.self\.query"):
        Embedder(folder)


def test_an_embedding_is_the_mean_over_the_tokens_of_its_text_alone(encoder: Path) -> None:
    embedder = Embedder(encoder)
    together = embedder.embed(["12", "123456", ""])
    model: Any = BertModel.from_pretrained(encoder).eval()
    with torch.inference_mode():
        alone = model(**AutoTokenizer.from_pretrained(encoder)("12", return_tensors="pt")).last_hidden_state[0]
    torch.testing.assert_close(together[0], alone.mean(dim=0), atol=1e-5, rtol=1e-5)
    assert together[2].abs().max() == 0.0
    assert embedder.embed(["1" * 500]).isfinite().all()  # beyond the encoder's context: cut
    visit = complete_visit("sample", [1], [1])
    same = result_of(visit, ["12", "12"], [0.0, 0.0], embedder=embedder)
    assert same.embedding_distance == pytest.approx(0.0, abs=1e-6)
    other = result_of(visit, ["12", "=="], [0.0, 0.0], embedder=embedder)
    assert other.embedding_distance is not None
    assert other.embedding_distance > 1e-3


def test_an_embedding_model_that_is_none_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.embedding_model"):
        Embedder(tmp_path)


# ---- How a searcher renews, returns and refuses its leases ----------------------------------------------------------


class RecordedBuffer:
    """Knows which leases are lost; `away` makes it answer nothing."""

    def __init__(self, *lost: str) -> None:
        self.lost, self.away = lost, False
        self.renewed: list[list[str]] = []
        self.returned: list[list[str]] = []
        self.refused: list[list[str]] = []

    def renew_leases(self, request: LeaseRenewal) -> LeaseRenewalReply:
        if self.away:
            raise UnavailableError("no answer")
        self.renewed.append(request.lease_ids)
        return LeaseRenewalReply(lost_lease_ids=[name for name in request.lease_ids if name in self.lost])

    def return_leases(self, request: LeaseReturn) -> None:
        if self.away:
            raise UnavailableError("no answer")
        self.returned.append(request.lease_ids)
        self.refused.append(request.refused_lease_ids)


def make_leases(buffer: Any, queue: WorkQueue, *delivering: str) -> tuple[LeaseManager, SearcherStatus]:
    status = SearcherStatus(searcher_id="s", run="r", waits=WaitRegistry())
    made = LeaseManager(buffer=buffer, renewals=buffer, queue=queue, delivering=lambda: set(delivering), status=status)
    return made, status


def make_queue(*names: str) -> WorkQueue:
    queue = WorkQueue(SearcherSection(max_response_tokens=4), run_seed=0, eos_ids=(1,))
    for name in names:
        queue.add(make_visit(name, num_rollouts=2))
    return queue


async def test_a_lost_lease_ends_its_visit_only_if_the_visit_is_not_begun() -> None:
    queue = make_queue("begun", "lost", "held")
    assert [request.request_id for request in queue.take_requests(1, pinned=None)] == ["begun/1"]
    buffer = RecordedBuffer("begun", "lost", "delivering")
    leases, _ = make_leases(buffer, queue, "delivering")
    await leases.renew()
    assert buffer.renewed == [["begun", "delivering", "held", "lost"]]
    assert [visit.lease.lease_id for visit in queue.open_visits()] == ["begun", "held"]
    assert [request.request_id for request in queue.take_requests(9, pinned=None)] == ["begun/2", "held/1", "held/2"]


async def test_a_renewal_that_fails_loses_nothing() -> None:
    queue = make_queue("a")
    buffer = RecordedBuffer("a")
    buffer.away = True
    leases, status = make_leases(buffer, queue)
    await leases.renew()
    await leases.return_leases(["a"], refused=["b"])
    assert len(queue.open_visits()) == 1
    assert status.counts["leases_returned"] == 0


async def test_many_leases_go_in_portions_and_no_lease_means_no_request() -> None:
    buffer = RecordedBuffer()
    leases, status = make_leases(buffer, make_queue())
    await leases.renew()
    await leases.return_leases([])
    assert (buffer.renewed, buffer.returned) == ([], [])
    ids = [f"lease-{number}" for number in range(MAX_LEASE_IDS + 1)]
    await leases.return_leases(ids, refused=ids[:2])
    assert [len(part) for part in buffer.returned] == [MAX_LEASE_IDS, 1, 0]
    assert buffer.refused == [[], [], ids[:2]]
    assert status.counts["leases_returned"] == MAX_LEASE_IDS + 1


@pytest.mark.parametrize(
    ("num_slots", "samples_per_insert", "num_visits"),
    [(64, None, 16), (64, 1.0, 4), (64, 4.0, 1), (8, 1.0, 2), (2, None, 1)],
)
def test_a_round_is_what_slots_and_flow_control_can_give(num_slots, samples_per_insert, num_visits) -> None:
    """A request for more than a batch makes room for would always wait to its end."""
    sampling = {"samples_per_insert": samples_per_insert, "prompts_per_batch": 4, "group_size": 4}
    recipe = make_recipe(searcher={"num_slots": num_slots}, sampling={**sampling, "rollouts_per_visit": 4})
    assert num_round_visits(recipe) == num_visits


# ---- No wait of a searcher swallows a cancellation, and a call that takes long is shown as a wait -------------------


async def test_a_task_that_is_cancelled_in_the_moment_its_pause_ends_is_cancelled() -> None:
    """asyncio.wait_for of Python 3.11 forgets such a cancellation (github.com/python/cpython/issues/86296)."""
    num_cancelled = 0
    for num_ticks in range(4):  # between the end of the inner wait and the end of the task
        event = asyncio.Event()
        task = asyncio.create_task(sleep_until(event, 60.0))
        for _ in range(3):
            await asyncio.sleep(0)
        event.set()
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            num_cancelled += 1
    assert num_cancelled


async def test_a_call_that_takes_long_is_a_wait_with_a_name(monkeypatch) -> None:
    monkeypatch.setattr("tba_searcher.waits.SLOW_CALL_S", 0.01)
    waits, answer = WaitRegistry(), threading.Event()
    asked = retry_until(lambda: answer.wait(60), waits=waits, owner="leasing", service="buffer", deadline_s=30.0)
    call = asyncio.create_task(asked)
    wait = await asyncio.to_thread(until, "the wait", waits.current)
    assert wait is not None
    assert wait.name == "buffer-unreachable"
    assert 0 < wait.deadline_in_s <= 30.0
    answer.set()
    assert await call is True
    assert waits.current() is None
