"""The searcher's measurements of evaluation samples: KL to the starting model, and diversity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_searcher.engines.engine import Completion
from tba_searcher.generation.evaluation_results import (
    Embedder,
    ResultBuilder,
    distinct_share,
    failed_result,
    mean_cosine_distance,
)
from tba_searcher.generation.visits import Visit
from transformers import AutoTokenizer, BertModel

from tba.api import Lease, Prompt
from tba.errors import ConfigError
from tba.versions import START
from tba.wire import Sampling
from tests.support.tiny_encoder import make_tiny_encoder


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make_visit(kind: Any, responses: Sequence[np.ndarray], *, reasons: Sequence[str] | None = None) -> Visit:
    prompt = Prompt(prompt_id="h", task="addition", text="1+1=", split="heldout")
    lease = Lease(
        lease_id="lease",
        kind=kind,
        visit_id="v",
        prompt=prompt,
        num_rollouts=len(responses),
        temperature=1.0,
        expires_in_s=60,
    )
    completions = [
        Completion(
            request_id=f"lease/{number}",
            response_tokens=response,
            sampler_logprobs=np.full(len(response), -0.5, np.float32),
            sampling=Sampling(temperature=1.0),
            finish_reason=reason,
            version_spans=(),
            started_at_s=0.0,
            finished_at_s=0.0,
        )
        for number, (response, reason) in enumerate(zip(responses, reasons or ["stop"] * len(responses), strict=True))
    ]
    return Visit(lease=lease, prompt_tokens=(5, 6), pinned=START, completions=completions)


def test_distinct_counts_different_n_grams_over_all_responses_together() -> None:
    responses = [tokens(1, 2, 1, 2), tokens(1, 2), tokens(7)]
    assert distinct_share(responses, 1) == 3 / 7
    assert distinct_share(responses, 2) == 2 / 4  # 12 21 12, 12; none crosses from one response into the next
    assert distinct_share(responses, 3) == 1.0
    assert distinct_share([tokens(1), tokens()], 2) is None


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


def test_the_log_ratio_is_that_of_the_samples_and_greedy_completions_have_none() -> None:
    asked: list[tuple[list[int], int]] = []

    def reference_sums(prompt: np.ndarray, responses: Sequence[np.ndarray]) -> list[float]:
        asked.append((prompt.tolist(), len(responses)))
        return [-3.0, float("-inf")]

    builder = ResultBuilder(reference_sums=reference_sums, embedder=None)
    result = builder.result(make_visit("sample", [tokens(4, 5, 1), tokens(4, 1)]), ["ab", "a"], [1.0, None])
    assert result.log_ratios == [-1.5 + 3.0, None]
    assert asked == [([5, 6], 2)]
    assert (result.rewards, result.num_response_tokens) == ([1.0, None], [3, 2])
    assert (result.distinct_1, result.distinct_2, result.distinct_3) == (2 / 3, 1.0, None)  # 4 5, 4: ends left out
    greedy = builder.result(make_visit("greedy", [tokens(4, 1)]), ["a"], [1.0])
    assert (greedy.log_ratios, greedy.distinct_1) == (None, None)
    assert len(asked) == 1


def test_a_response_cut_at_its_length_limit_counts_with_all_its_tokens() -> None:
    visit = make_visit("sample", [tokens(4, 5)], reasons=["length"])
    result = ResultBuilder(reference_sums=None, embedder=None).result(visit, ["ab"], [0.0])
    assert (result.distinct_1, result.distinct_2, result.log_ratios) == (1.0, 1.0, None)


def test_a_prompt_that_cannot_be_sampled_is_reported_as_unknown() -> None:
    result = failed_result(make_visit("sample", [tokens(1), tokens(1)]))
    assert (result.rewards, result.num_response_tokens, result.distinct_1) == ([None, None], [0, 0], None)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder"))


def test_an_embedding_is_the_mean_over_the_tokens_of_its_text_alone(encoder: Path) -> None:
    embedder = Embedder(encoder)
    together = embedder.embed(["12", "123456", ""])
    model: Any = BertModel.from_pretrained(encoder).eval()
    with torch.inference_mode():
        alone = model(**AutoTokenizer.from_pretrained(encoder)("12", return_tensors="pt")).last_hidden_state[0]
    torch.testing.assert_close(together[0], alone.mean(dim=0), atol=1e-5, rtol=1e-5)
    assert together[2].abs().max() == 0.0
    assert embedder.embed(["1" * 500]).isfinite().all()  # beyond the encoder's context: cut
    builder = ResultBuilder(reference_sums=None, embedder=embedder)
    same = builder.result(make_visit("sample", [tokens(1), tokens(1)]), ["12", "12"], [0.0, 0.0])
    assert same.embedding_distance == pytest.approx(0.0, abs=1e-6)
    other = builder.result(make_visit("sample", [tokens(1), tokens(1)]), ["12", "=="], [0.0, 0.0])
    assert other.embedding_distance is not None
    assert other.embedding_distance > 1e-3


def test_an_embedding_model_that_is_none_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.embedding_model"):
        Embedder(tmp_path)
