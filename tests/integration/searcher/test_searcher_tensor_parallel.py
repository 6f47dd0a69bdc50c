"""The vLLM engine with two ranks on the CPU: parts of the contract of every engine, and what ranks add to it."""

from __future__ import annotations

import pytest

from tests.support.vllm_greedy import TIMEOUT_S, outcomes_of, why_not
from tests.support.vllm_ranks_cases import RANK_CASES

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(TIMEOUT_S + 120)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, str]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return outcomes_of("tests.support.vllm_ranks_cases", tmp_path_factory.mktemp("ranks"), pytestconfig)


@pytest.mark.parametrize("case", RANK_CASES)
def test_two_ranks(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "passed", outcomes[case]
