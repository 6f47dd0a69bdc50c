"""The chart's README is made from values.yaml, in which every value is described."""

from __future__ import annotations

from charts.tools.readme import CHART, text, undescribed

VALUES = (CHART / "values.yaml").read_text()


def test_every_value_is_described() -> None:
    assert undescribed(VALUES) == []


def test_the_readme_is_what_values_make() -> None:
    assert (CHART / "README.md").read_text() == text(), "run `make chart-docs`"
