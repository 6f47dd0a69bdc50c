"""The parts of model scorers: batches, inputs, seeded sampling, settings."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tba_reward.child_messages import CancelRequest, ScoreAnswer, ScoreRequest
from tba_reward.model_server.child import model_loader
from tba_reward.model_server.child.judges import RedteamJudge, _mean_of
from tba_reward.model_server.child.server import Batcher, TokenizedRequest, cut_batches
from tba_reward.model_server.child.victim import SeededSampling, reply_seed
from tba_reward.model_server.client import MAX_SUSPECTS, ModelProcess, ProcessDiedError
from tba_reward.scorer import Failure, Outcome

from tba.config.reward import RedteamSpec, RewardModelSpec


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), max_size=30), st.integers(1, 100))
def test_every_job_is_in_one_batch_and_no_batch_is_larger_than_asked_for(shapes, batch_tokens):
    batches = cut_batches(shapes, batch_tokens)
    assert sorted(at for batch in batches for at in batch) == list(range(len(shapes)))
    for batch in batches:
        padded = max(shapes[at][0] for at in batch) * sum(shapes[at][1] for at in batch)
        assert padded <= batch_tokens or len(batch) == 1


def test_batches_are_of_similar_lengths():
    assert cut_batches([(50, 1), (1, 1), (49, 1), (2, 1)], 100) == [[1, 3], [2, 0]]


def test_a_request_that_may_kill_the_process_has_a_batch_of_its_own():
    requests = [request(1, "a"), msgspec.structs.replace(request(2, "bb"), alone=True), request(3, "c")]
    assert run(requests)[0].batches == [[2], [1, 3]]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{prompt}{response}", "a{response}b{prompt}"),
        ("Q: {prompt} A: {response} {x}", "Q: a{response} A: b{prompt} {x}"),
        ("{response} to {prompt}", "b{prompt} to a{response}"),
    ],
)
def test_a_template_is_filled_once_whatever_the_texts_hold(template, text):
    assert model_loader.fill(template, "a{response}", "b{prompt}") == text


def test_the_padding_token_is_one_that_no_row_holds():
    assert model_loader.unused_id([[5, 6], [7]], 9) == 9
    assert model_loader.unused_id([[0, 2], [9]], 9) == 1
    assert model_loader.unused_id([[0, 1]], None) == 2


@pytest.mark.parametrize(("side", "ids", "mask"), [("right", [4, 5, 0], [1, 1, 0]), ("left", [0, 4, 5], [0, 1, 1])])
def test_rows_are_padded_on_one_side(side, ids, mask):
    got_ids, got_mask = model_loader.pad([[1, 2, 3], [4, 5]], 0, side=side)
    assert got_ids.tolist() == [[1, 2, 3], ids]
    assert got_mask.tolist() == [[1, 1, 1], mask]


def test_an_input_without_tokens_and_one_that_is_too_long_are_refused():
    assert model_loader.check_length(0, 5, "it") == Failure("bad_data", "it has no tokens")
    assert model_loader.check_length(6, 5, "it") == Failure("too_long", "it has 6 tokens, and at most 5 are taken")
    assert model_loader.check_length(5, 5, "it") is None


class Recording:
    """A judge whose score is the length of the response; some responses break it."""

    digest = ""

    def __init__(self):
        self.batches = []

    def prepare(self, request):
        if request.response == "refuse":
            return Failure("too_long", "no")
        if request.response == "untokenizable":
            raise KeyError("no such token")
        return TokenizedRequest(request, None, len(request.response))

    def score(self, batch) -> list[Outcome]:
        numbers = [j.request.number for j in batch]
        self.batches.append(numbers)
        if 13 in numbers:
            raise MemoryError("13")
        return [float(j.num_tokens) for j in batch]


def run(requests) -> tuple[Recording, dict[int, Any], list[Any]]:
    sent = []
    judge = Recording()
    batcher = Batcher(judge, 1000, sent.append)
    for request in requests:
        batcher.take(request)
    batcher.compute()
    return judge, {m.number: m.outcome for m in sent if isinstance(m, ScoreAnswer)}, sent


def request(number, response):
    return ScoreRequest(number=number, prompt="", response=response)


def test_a_request_that_breaks_its_batch_fails_alone():
    judge, answers, _ = run([request(n, "x" * (n + 1)) for n in range(11, 16)])
    failed = answers.pop(13)
    assert (failed.reason, answers) == ("out_of_memory", {11: 12.0, 12: 13.0, 14: 15.0, 15: 16.0})
    assert judge.batches[0] == [11, 12, 13, 14, 15]


def test_what_cannot_be_tokenized_has_a_reason_and_disturbs_nobody():
    _, answers, _ = run([request(1, "refuse"), request(2, "untokenizable"), request(3, "abc")])
    assert (answers[1].reason, answers[2].reason, answers[3]) == ("too_long", "exception", 3.0)
    assert "no such token" in answers[2].detail


def test_a_cancelled_request_is_not_computed_and_is_answered_once():
    cancels = [CancelRequest(number=1), CancelRequest(number=7)]
    judge, answers, sent = run([request(1, "abc"), request(2, "abc"), *cancels])
    assert judge.batches == [[2]]
    assert answers[2] == 3.0
    assert [m.number for m in sent if isinstance(m, ScoreAnswer)] == [1, 2]


def test_the_seed_of_a_reply_is_a_function_of_attack_number_and_seed():
    assert reply_seed("attack ", 1) == reply_seed("attack", 1)
    assert len({reply_seed(attack, n) for attack in "ab" for n in (0, 1)}) == 4


def test_seeded_draws_follow_the_distribution_of_temperature_and_top_p():
    """Chi-square of 20 000 draws against the exact probabilities; the tail that top_p cuts is never drawn."""
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04]))
    temperature, top_p, number = 0.7, 0.92, 20_000
    sampling = SeededSampling(temperature, top_p, list(range(number)), torch.device("cpu"))
    scores = sampling(torch.zeros(number, 1, dtype=torch.int64), logits.expand(number, -1))
    assert torch.isfinite(scores).sum(-1).eq(1).all()
    probs = (logits / temperature).softmax(-1)  # .59, .22, .11, .03, .02: the first three hold 92 %
    kept = probs[:3] / probs[:3].sum()
    drawn = Counter(scores.argmax(-1).tolist())
    assert set(drawn) == {0, 1, 2}
    chi_square = sum((drawn[n] - number * float(p)) ** 2 / (number * float(p)) for n, p in enumerate(kept))
    assert chi_square < 13.8  # two degrees of freedom: one in a thousand


def test_a_row_draws_the_same_in_every_batch():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    together = SeededSampling(1.0, 1.0, [1, 2, 3], torch.device("cpu"))
    alone = SeededSampling(1.0, 1.0, [2], torch.device("cpu"))
    ids = torch.zeros(3, 1, dtype=torch.int64)
    for _ in range(5):
        assert torch.equal(together(ids, logits)[1], alone(ids[:1], logits[1:2])[0])


async def test_a_text_that_kills_is_remembered_though_nobody_waits_for_it_any_more():
    """Its request was given up both times; the next one gets the failure, the one after that begins from nothing."""
    process = ModelProcess(RewardModelSpec(kind="reward_model", model="m"), load_timeout_s=1)
    for number in (0, 1):
        process._state = "ready"
        process._in_flight = {number: request(number, "bad"), 7: request(7, "good")}
        process._computing = {number}
        process._on_death(ProcessDiedError("it was killed by SIGSEGV"))
    wanted = Failure("crashed", "the model process failed on this twice: it was killed by SIGSEGV")
    assert await process.score("", "bad", timeout_s=1.0) == wanted
    waited = Failure("timeout", "the model process did not answer within 0.0 s")
    assert await process.score("", "bad", timeout_s=0.0) == waited
    assert await process.score("", "good", timeout_s=0.0) == waited


async def test_only_so_many_suspects_are_remembered():
    process = ModelProcess(RewardModelSpec(kind="reward_model", model="m"), load_timeout_s=1)
    process._state = "ready"
    process._in_flight = {n: request(n, str(n)) for n in range(MAX_SUSPECTS + 10)}
    process._on_death(ProcessDiedError("it is gone"))
    assert len(process._suspects) == MAX_SUSPECTS


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (lambda: RewardModelSpec(kind="reward_model", model="m", template="{prompt}"), "must have {response} once"),
        (lambda: RewardModelSpec(kind="reward_model", model="m", timeout_s=5), "more than the 20 s of a batch"),
        (lambda: RedteamSpec(kind="redteam", victim="v", classifier="c", victim_template="x"), "has no {prompt}"),
        (lambda: RewardModelSpec(kind="reward_model", model="m", missing_eos_penalty=math.nan), "finite"),
    ],
)
def test_settings_that_cannot_work_are_refused(spec, complaint):
    with pytest.raises(ValidationError, match=complaint):
        spec()


def test_a_reply_without_a_score_leaves_its_attack_without_one():
    assert _mean_of([0.25, 0.75]) == 0.5
    failure = _mean_of([0.5, Failure("not_finite", "the model's output is nan")])
    assert isinstance(failure, Failure)
    assert failure.reason == "not_finite"


def test_replies_of_another_kind_of_device_are_another_version():
    def digest(device_type):
        judge = object.__new__(RedteamJudge)
        judge._victim = SimpleNamespace(digest="v", device_type=device_type)  # pyright: ignore[reportAttributeAccessIssue]
        judge._classifier = SimpleNamespace(digest="c")  # pyright: ignore[reportAttributeAccessIssue]
        return judge.digest

    assert digest("cpu") == digest("cpu") != digest("cuda")
