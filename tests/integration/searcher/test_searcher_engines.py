"""The engines against one contract (tests/support/engine_contract.py): embedded; vLLM in a process."""

from __future__ import annotations

import pytest
from tba_searcher.engines.vllm.environment import prepare_vllm

from tba.errors import ConfigError
from tests.support.engine_contract import CASES
from tests.support.vllm_cases import VLLM_CASES, Benches, make_embedded
from tests.support.vllm_greedy import TIMEOUT_S, outcomes_of, why_not

pytestmark = pytest.mark.timeout(TIMEOUT_S + 120)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Benches:
    return Benches(make_embedded, tmp_path_factory.mktemp("embedded"))


@pytest.fixture(scope="module")
def by_vllm(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, str]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return outcomes_of("tests.support.vllm_cases", tmp_path_factory.mktemp("vllm"), pytestconfig)


@pytest.mark.parametrize("case", CASES)
def test_embedded(embedded: Benches, case: str) -> None:
    model, function = CASES[case]
    function(embedded.of(model))


@pytest.mark.parametrize("case", [*CASES, *VLLM_CASES])
def test_vllm(by_vllm: dict[str, str], case: str) -> None:
    assert by_vllm[case] == "passed", by_vllm[case]


def test_without_vllm_the_recipe_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vllm.*pip install vllm"):
        prepare_vllm("cpu")
