"""Policy versions and policy age, along one lineage and across them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import MalformedError
from tba.versions import START, LineageTree, PolicyVersion


def V(text: str) -> PolicyVersion:
    return PolicyVersion.parse(text)


@st.composite
def trees(draw: st.DrawFn) -> LineageTree:
    """Up to five lineages; each starts from an older one, at a step that one could have reached."""
    tree = LineageTree()
    for lineage in range(1, draw(st.integers(1, 5)) + 1):
        older = draw(st.integers(0, lineage - 1))
        first = tree.parents[older].step if older in tree.parents else 0
        step = 0 if older == 0 else draw(st.integers(first, first + 50))
        tree.add(lineage, PolicyVersion(older, step))
    return tree


def version_in(draw: st.DrawFn, tree: LineageTree) -> PolicyVersion:
    lineage = draw(st.sampled_from([0, *tree.parents]))
    first = tree.parents[lineage].step if lineage in tree.parents else 0
    return PolicyVersion(lineage, 0 if lineage == 0 else draw(st.integers(first, first + 60)))


@st.composite
def trees_with_two_versions(draw: st.DrawFn) -> tuple[LineageTree, PolicyVersion, PolicyVersion]:
    tree = draw(trees())
    return tree, version_in(draw, tree), version_in(draw, tree)


def age_by_walking(tree: LineageTree, rollout: PolicyVersion, trainer: PolicyVersion) -> int:
    """The definition, slowly: walk both back to the start; the last common set of weights is where they parted."""

    def weights_on_the_way(version: PolicyVersion) -> list[PolicyVersion]:
        seen = []
        while True:
            first = tree.parents[version.lineage].step if version.lineage in tree.parents else 0
            seen += [PolicyVersion(version.lineage, step) for step in range(version.step, first, -1)]
            if version.lineage not in tree.parents:
                return [*seen, START]
            version = tree.parents[version.lineage]

    of_trainer = set(weights_on_the_way(trainer))
    parted = next(version.step for version in weights_on_the_way(rollout) if version in of_trainer)
    return max(0, trainer.step - min(rollout.step, parted))


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**12 - 1))
def test_text_and_version_are_the_same_thing(lineage: int, step: int) -> None:
    version = PolicyVersion(lineage, step)
    assert V(str(version)) == version


@pytest.mark.parametrize("text", ["", "1", "1-", "-1", "1-2-3", "01-2", "1-02", "1--2", "1-2 ", "1-2\n", "x-1", "१-1"])
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(MalformedError, match="for example 1-40"):
        V(text)


def test_versions_are_ordered_by_lineage_then_step() -> None:
    assert sorted([V("2-1"), V("1-10"), V("1-9"), START]) == [START, V("1-9"), V("1-10"), V("2-1")]


@pytest.mark.parametrize(
    ("rollout", "trainer", "age"),
    [
        ("1-40", "1-40", 0),
        ("1-40", "1-48", 8),
        ("1-48", "1-40", 0),  # published ahead of the step that consumes it
        ("0-0", "1-0", 0),
        ("0-0", "1-30", 30),
        ("1-110", "2-140", 40),  # made by the dead branch after 1-100, which both share
        ("1-90", "2-140", 50),  # made before they parted
        ("1-100", "2-100", 0),
        ("1-140", "2-101", 1),
        ("2-120", "1-140", 40),  # the other way round
        ("2-150", "3-130", 10),  # 3 resumed from 2-120: steps since 120
        ("1-110", "3-130", 30),  # through two restarts: parted at 100
    ],
)
def test_policy_age_across_two_restarts(rollout: str, trainer: str, age: int) -> None:
    tree = LineageTree({1: START, 2: V("1-100"), 3: V("2-120")})
    assert tree.policy_age(V(rollout), V(trainer)) == age


@given(trees_with_two_versions())
def test_policy_age_is_what_walking_back_step_by_step_gives(case: tuple) -> None:
    tree, rollout, trainer = case
    assert tree.policy_age(rollout, trainer) == age_by_walking(tree, rollout, trainer)


def test_a_parent_is_an_older_lineage() -> None:
    for parent in (V("2-1"), V("3-1")):
        with pytest.raises(MalformedError, match="a parent is an older lineage"):
            LineageTree({2: parent})
