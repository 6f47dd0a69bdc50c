"""The chart's README is made from values.yaml, in which every value is described."""

from __future__ import annotations

import pytest

from charts.tools.readme import CHART, described, text, undescribed

VALUES = (CHART / "values.yaml").read_text()


def test_every_value_is_described() -> None:
    assert undescribed(VALUES) == []


def test_the_readme_is_what_values_make() -> None:
    assert (CHART / "README.md").read_text() == text(), "run `make chart-docs`"


def test_descriptions_are_sentences() -> None:
    bad = [".".join(value.path) for value in described(VALUES) if not value.text[:1].strip() or "  " in value.text]
    assert bad == []


def test_a_value_without_description_is_found() -> None:
    assert undescribed("# -- One.\na: 1\nb: {c: 2}\n") == ["b.c"]
    assert undescribed("# -- One.\na: 1\nb:\n  # -- Two,\n  # three.\n  c: 2\n") == []
    assert [value.text for value in described("# -- Two,\n# three.\nc: {d: 1}\n")] == ["Two, three."]


def test_a_description_without_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2"):
        list(described("# -- Nothing below.\n\na: 1\n"))
