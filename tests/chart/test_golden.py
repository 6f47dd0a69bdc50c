"""The chart makes what is kept in golden/: a change of a template is seen, and looked at, before it is merged."""

from __future__ import annotations

import pytest

from tests.support.chart import needs_helm
from tests.support.chart_golden import CASES, FOLDER, made

pytestmark = needs_helm


@pytest.mark.parametrize("name", CASES)
def test_the_chart_makes_what_is_kept(name: str) -> None:
    kept = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert made(name).splitlines() == kept, "look at the difference; if it is meant, run `make golden`"


def test_no_golden_output_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CASES)
