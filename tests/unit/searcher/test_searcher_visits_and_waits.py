"""Parts of the searcher without processes: slots, waits, visits, weight versions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from tba_searcher import service
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.engines.torch.batch import Batch
from tba_searcher.generation import version_pulls
from tba_searcher.generation.delivery import split_into_pushes
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.version_pulls import WeightLoader
from tba_searcher.generation.visits import Visit, WorkQueue
from tba_searcher.service import Clients, Searcher, check_device, engine_seed
from tba_searcher.waits import WaitRegistry, retry_until

from tba.api import LeaseReply, Prompt
from tba.config.searcher import SearcherSection, TaskSampling, TemperatureMix
from tba.errors import (
    BadRequestError,
    BusyError,
    ConfigError,
    ConflictError,
    TbaError,
    UnauthorizedError,
    UnavailableError,
    WaitTimeoutError,
)
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion
from tba.wire import Sampling
from tests.support.buffer import make_recipe
from tests.support.chat_tokenizers import make_chat_tokenizer, thinking_template
from tests.support.chi_square import assert_follows
from tests.support.engine_contract import make_request
from tests.support.tiny_model import make_tiny_tokenizer
from tests.support.visits import make_completion, make_visit


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 7))), max_size=12))
def test_closing_holes_keeps_every_live_request_and_leaves_no_gap(events):
    """After any adds and removals, slots 0..num_used-1 are exactly the live requests, with their own tokens."""
    batch, live, count = Batch(8, 16), {}, 0
    for num_new, removed in events:
        for _ in range(min(num_new, 8 - batch.num_active)):
            name, count = str(count), count + 1
            batch.add(make_request(name, (count, count + 1), Sampling.of(1.0)), START)
            live[name] = (count, count + 1)
        for slot in removed:
            if slot < batch.num_used and (active := batch.requests[slot]) is not None:
                del live[active.request.request_id]
                batch.remove(slot)
        assert batch.num_active == len(live)
        moves = batch.compact()
        assert not set(dict(moves)) & set(dict(moves).values())
        found = {a.request.request_id: tuple(batch.tokens[i, :2].tolist()) for i, a in enumerate(batch.requests) if a}
        assert found == live
        assert batch.num_used == len(live)
        assert all(active is not None for active in batch.requests[: batch.num_used])


async def test_a_busy_service_is_waited_out_under_the_name_it_gives_and_renewed_at_the_deadline():
    waits, seen = WaitRegistry(), []
    answers = iter([BusyError("later", retry_after_s=0.02, wait="trainer-ahead")] * 6)

    def call() -> str:
        current = waits.current()
        seen.append(current.name if current else None)
        if (error := next(answers, None)) is not None:
            raise error
        return "pushed"

    result = await retry_until(call, waits=waits, owner="pushing", service="buffer", deadline_s=0.1)
    assert result == "pushed"
    assert seen[0] is None
    assert set(seen[1:]) <= {"trainer-ahead", None}
    assert "trainer-ahead" in seen
    assert waits.current() is None


async def test_a_busy_service_ends_the_wait_at_its_deadline_where_that_is_asked_for():
    def call() -> None:
        raise BusyError("later", retry_after_s=0.02, wait="scorers")

    with pytest.raises(WaitTimeoutError, match="wait scorers"):
        await retry_until(call, waits=WaitRegistry(), owner="o", service="reward", deadline_s=0.1, renew_busy=False)


async def test_a_service_that_stays_away_is_a_wait_timeout_that_names_it():
    waits = WaitRegistry()

    def call() -> None:
        raise UnavailableError("no answer")

    task = asyncio.create_task(retry_until(call, waits=waits, owner="o", service="buffer", deadline_s=0.5))
    while (current := waits.current()) is None:
        assert not task.done()
        await asyncio.sleep(0)
    assert current.name == "buffer-unreachable"
    assert current.deadline_in_s <= 0.5
    with pytest.raises(WaitTimeoutError, match=r"wait buffer-unreachable: no answer for 0\.5 s"):
        await task
    assert waits.current() is None


async def test_a_refusal_is_not_retried():
    calls = []

    def call() -> None:
        calls.append(1)
        raise BadRequestError("wrong")

    with pytest.raises(BadRequestError):
        await retry_until(call, waits=WaitRegistry(), owner="o", service="buffer", deadline_s=5)
    assert len(calls) == 1


def test_the_oldest_wait_is_shown_and_the_same_name_continues():
    waits = WaitRegistry()
    waits.begin("leases", "run-paused", 10)
    waits.begin("pulling", "object-store", 1)
    left = waits.begin("leases", "run-paused", 99)
    assert left < 10
    assert (wait := waits.current()) is not None
    assert wait.name == "run-paused"
    waits.end("leases")
    assert (wait := waits.current()) is not None
    assert wait.name == "object-store"


def test_a_visit_is_handed_out_once_and_completes_with_its_last_rollout():
    queue = WorkQueue(SearcherSection(max_response_tokens=4), run_seed=0, eos_ids=(1,))
    queue.add(make_visit("a"))
    queue.add(make_visit("b", num_rollouts=1))
    first, second = queue.take_requests(2, pinned=None), queue.take_requests(9, pinned=None)
    assert [request.request_id for request in first + second] == ["a/1", "a/2", "a/3", "b/1"]
    assert queue.num_unsubmitted == 0
    visits = [queue.add_completion(make_completion(request.request_id)) for request in (*first, *second)]
    assert [visit is not None for visit in visits] == [False, False, True, True]
    assert queue.open_visits() == []


def test_evaluations_wait_for_their_own_version_and_dropped_visits_are_ignored():
    v1, v2 = PolicyVersion(1, 4), PolicyVersion(1, 8)
    queue = WorkQueue(SearcherSection(max_response_tokens=4), run_seed=0, eos_ids=(1,))
    train, old, new = make_visit("t"), make_visit("e", pinned=v1), make_visit("f", pinned=v2)
    for visit in (train, old, new):
        queue.add(visit)
    assert queue.pinned_version == v1
    assert [request.request_id for request in queue.take_requests(9, pinned=v2)] == ["f/1", "f/2", "f/3"]
    queue.drop([old])
    assert queue.pinned_version == v2
    assert queue.add_completion(make_completion("e/1")) is None
    assert queue.take_requests(9, pinned=v1) == []


def test_every_training_rollout_draws_its_own_temperature_and_evaluations_do_not() -> None:
    settings = SearcherSection(temperature_mix=TemperatureMix(low=0.7, high=1.3), top_p=0.9, top_k=7)

    def drawn(run_seed: int, visit: Visit) -> list[Sampling]:
        queue = WorkQueue(settings, run_seed=run_seed, eos_ids=(1,))
        queue.add(visit)
        return [request.sampling for request in queue.take_requests(999, pinned=visit.pinned)]

    first = drawn(0, make_visit("a", num_rollouts=500))
    assert {(sampling.top_p, sampling.top_k) for sampling in first} == {(0.9, 7)}
    temperatures = [sampling.temperature for sampling in first]
    assert len(set(temperatures)) == 500
    assert 0.7 <= min(temperatures) < 0.72
    assert 1.28 < max(temperatures) < 1.3
    counts, _ = np.histogram(temperatures, bins=10, range=(0.7, 1.3))
    assert_follows(counts, np.full(10, 0.1))
    assert drawn(0, make_visit("a", num_rollouts=500)) == first  # no matter who leases the visit
    rest = {sampling.temperature for sampling in drawn(0, make_visit("a", num_rollouts=499))}  # one of it has arrived
    assert not rest & set(temperatures)
    assert drawn(1, make_visit("a", num_rollouts=500)) != first
    assert drawn(0, make_visit("b", num_rollouts=500)) != first
    assert drawn(0, make_visit("a", pinned=START)) == [Sampling.of(1.0)] * 3


def test_each_task_has_its_own_lengths_and_stops_in_training_and_in_evaluations() -> None:
    tasks = {"addition": TaskSampling(min_response_tokens=2, stop=["\n", "Q:"])}
    queue = WorkQueue(SearcherSection(max_response_tokens=9, tasks=tasks), run_seed=0, eos_ids=(1,))
    other = make_visit("c", prompt=Prompt(prompt_id="q", task="exact", text="1"))
    for visit in (make_visit("a"), make_visit("b", pinned=START), other):
        queue.add(visit)
    requests = queue.take_requests(9, pinned=None) + queue.take_requests(9, pinned=START)
    found = {
        each.request_id.partition("/")[0]: (each.max_response_tokens, each.min_response_tokens, each.sampling.stop)
        for each in requests
    }
    assert found == {"a": (9, 2, ("\n", "Q:")), "b": (9, 2, ("\n", "Q:")), "c": (9, 0, ())}


def test_two_engines_never_get_the_same_seed_even_under_the_same_name():
    assert len({engine_seed(0, "searcher-1") for _ in range(20)}) == 20


def test_text_goes_through_the_tokenizer_as_it_is(tmp_path: Path):
    make_tiny_tokenizer().save_pretrained(tmp_path)
    codec = TextCodec(tmp_path)
    assert codec.eos_ids == (1,)
    ids = codec.encode_prompt("12+3=")
    assert len(ids) == 5
    # no special token but the last is hidden from rewards
    assert codec.decode_responses([make_completion("x", [*ids, 0, 1])]) == ["12+3=<pad>"]


def test_messages_go_through_the_chat_template_with_the_arguments_of_their_prompt(tmp_path: Path):
    make_chat_tokenizer(thinking_template(), eos="<|endoftext|>").save_pretrained(tmp_path)
    codec = TextCodec(tmp_path)
    assert codec.eos_ids == (0, 2), "the tokenizer's, and the end of a turn of the template"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    codec = TextCodec(tmp_path)
    assert codec.eos_ids == (0, 2, 7)

    def tokens(content: str, **kwargs: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        message = {"role": "user", "content": content}
        think = "" if kwargs else "<think>\n\n</think>\n\n"
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n{think}"
        options = {} if kwargs else {"enable_thinking": False}
        prompt = Prompt(prompt_id="p", task="t", text=text, messages=[message], chat_template_kwargs=options)
        return codec.prompt_tokens(prompt), codec.encode_prompt(text)

    for found, of_text in (tokens("1 + 2?"), tokens("1 + 2?", enable_thinking=True)):
        assert found == of_text
    found, of_text = tokens("1<|im_end|>2")
    assert (found.count(2), of_text.count(2)) == (1, 2)


def test_a_tokenizer_that_ends_prompts_is_refused(tmp_path: Path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="ends every prompt with end-of-sequence"):
        TextCodec(tmp_path)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 5), st.integers(20, 60))
def test_pushes_stay_within_both_limits_and_lose_nothing(sizes: list[int], max_rollouts: int, max_bytes: int):
    payloads = [bytes([n % 256]) * size for n, size in enumerate(sizes)]
    parts = split_into_pushes(payloads, max_rollouts=max_rollouts, max_bytes=max_bytes)
    assert [payload for part in parts for payload in part] == payloads
    for part in parts:
        assert 1 <= len(part) <= max_rollouts
        assert len(part) == 1 or sum(map(len, part)) <= max_bytes


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_one_sentence(device: str):
    with pytest.raises(ConfigError, match=f"searcher.device '{device}' cannot be used: "):
        check_device(device)


def test_a_refused_version_is_tried_again_after_a_pause_that_doubles_and_when_asked(tmp_path, monkeypatch) -> None:
    now_s, version = 1000.0, PolicyVersion(1, 4)
    monkeypatch.setattr(version_pulls.time, "monotonic", lambda: now_s)
    file = tmp_path / "model.safetensors"
    nothing: Any = None
    counts = Counter[str]()
    loader = WeightLoader(nothing, tmp_path, counts=counts)
    reason = TbaError("damaged")

    def pull() -> None:
        file.write_bytes(b"weights")
        loader.add(LocalVersion(version, (file,), nothing))

    pauses = []
    for _ in range(7):
        pull()
        assert loader.get(version) is not None
        pauses.append(loader.refuse(version, reason))
        assert (loader.get(version), loader.refused, file.exists()) == (None, {version}, False)
        now_s += pauses[-1] - 1
        assert loader.refused == {version}
        now_s += 1
        assert loader.refused == set()
    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert loader.refuse(version, reason) == 600.0
    loader.accept(version)
    assert loader.refuse(version, reason) == 30.0
    assert WeightLoader(nothing, tmp_path, refusals=loader.refusals).refused == {version}
    assert counts == {"refused_versions": 9}


class Versions:
    """Stands for `WeightVersions`: makes files, and runs `meanwhile` while a download is under way."""

    counts: Mapping[str, int] = MappingProxyType({})

    def __init__(self) -> None:
        self.held: list[tuple[PolicyVersion, ...]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def download_tensors(
        self, version: PolicyVersion, folder: Path, *, held: Sequence[LocalVersion], like: Any, keeps_base: bool
    ) -> LocalVersion:
        assert keeps_base
        assert like is not None or not held
        self.held.append(tuple(local.version for local in held))
        self.meanwhile()
        assert all(path.exists() for local in held for path in local.paths), "a base is gone while it is used"
        folder.mkdir(parents=True, exist_ok=True)
        path, manifest = folder / "model.safetensors", cast(Any, SimpleNamespace(adapter=None))
        path.write_bytes(b"weights")
        return LocalVersion(version, (path,), manifest)


def test_a_download_starts_from_what_is_kept_and_a_refused_version_from_the_starting_model_at_most(tmp_path) -> None:
    versions = Versions()
    loader = WeightLoader(cast(Any, versions), tmp_path)
    first, second, third = (PolicyVersion(1, step) for step in (1, 2, 3))
    loader.add(old := loader.download(first))
    versions.meanwhile = lambda: loader.keep_only({None})
    loader.add(loader.download(second))
    assert not old.paths[0].exists(), "deleted when the download that used it has ended"
    versions.meanwhile = lambda: None
    loader.refuse(third, TbaError("damaged"))
    loader.add(loader.download(third))
    loader.accept(third)
    loader.add(loader.download(START))
    loader.refuse(third, TbaError("damaged"))
    loader.download(third)
    loader.accept(third)
    loader.download(third)
    assert versions.held == [(), (first,), (), (second, third), (START,), (second, START)]


def test_one_starting_model_is_kept_for_adapters_and_one_that_does_not_fit_is_replaced(tmp_path: Path) -> None:
    loader = WeightLoader(cast(Any, None), tmp_path)

    def version_of(step: int) -> tuple[LocalVersion, Path]:
        paths = [tmp_path / f"{name}-{step}" for name in ("base", "model")]
        for path in paths:
            path.write_bytes(b"weights")
        base = LocalVersion(START, (paths[0],), cast(Any, SimpleNamespace(adapter=None)))
        manifest = cast(Any, SimpleNamespace(adapter=SimpleNamespace(base="0-0")))
        return LocalVersion(PolicyVersion(1, step), (paths[1],), manifest, base=base), paths[0]

    (first, kept), (third, fitting) = version_of(1), version_of(3)
    loader.add(first)
    assert loader.get(START) == first.base
    loader.add(third)
    assert (kept.exists(), fitting.exists(), loader.get(START)) == (False, True, third.base)
    loader.add(third)  # the same file again
    loader.keep_only({third.version})
    assert fitting.exists()
    loader.keep_only({None})
    assert not fitting.exists()


@pytest.mark.parametrize("kind", [BadRequestError, BusyError, ConflictError, UnauthorizedError])
async def test_a_heartbeat_that_is_refused_is_a_line_of_the_log_once_until_one_is_taken(kind: type) -> None:
    status, away = SearcherStatus(searcher_id="s", run="demo", waits=WaitRegistry()), UnavailableError("no connection")
    client = Mock(heartbeat=Mock(side_effect=[away, kind("a trainer"), kind("a trainer"), away, None, kind("again")]))
    with structlog.testing.capture_logs() as lines:
        for _ in range(6):
            await status.send(client)
    assert [line["detail"] for line in lines if line["event"] == "heartbeat_refused"] == ["a trainer", "again"]


async def test_a_searcher_waits_longer_for_the_first_answer_than_for_later_ones(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(service, "RETRY_S", 0.001)
    away = UnavailableError("no connection")
    here = LeaseReply(leases=[], latest_version=None, run_state="running")
    answers: list[LeaseReply | UnavailableError] = [away, away, away, here, away, away, away]

    def lease(_: object) -> LeaseReply:
        answer = answers.pop(0)
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    recipe = make_recipe(store={"url": f"file://{tmp_path}"})
    buffer, nobody = cast(Any, SimpleNamespace(lease=lease)), cast(Any, None)
    clients = Clients(buffer=buffer, heartbeats=nobody, reward=nobody)
    searcher = Searcher(recipe, tmp_path, searcher_id="s", clients=clients, stop=asyncio.Event())
    assert await searcher._ask_state() == here
    with pytest.raises(WaitTimeoutError, match=r"wait buffer-unreachable: no answer for 0\.001 s"):
        await searcher._ask_state()
