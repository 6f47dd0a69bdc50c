"""The data sets of TL;DR in small: splits, the form of a post, and the rule that decides what is a better summary."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import islice

import pytest

from examples.worlds.tldr import summaries
from examples.worlds.tldr.summaries import Post, noisy_summary, posts, quality, reading_answers, split_of

POST = Post(
    subreddit="family",
    title="my boss and the car",
    sentences=("my boss Tom sold the old car to Ana.", "we had tea.", "in the end Ana left town."),
    salient=("Tom sold the car to Ana", "Ana left town"),
    fillers=("we had tea",),
)


def some_posts(split: str = "train", count: int = 200, seed: int = 0) -> list[Post]:
    return list(islice(posts(split, random.Random(seed)), count))


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (" Tom sold the car to Ana and Ana left town.", 1.0),
        ("Ana left town and Tom sold the car to Ana.", 1.0),
        ("Tom sold the car to Ana.", 0.5),
        ("Tom sold the car to Ana and Ana left town and we had tea.", 0.75),
        ("Tom sold the car to Ana and Ana left town and Ana left town.", 0.75),
        ("Lee sold the car to Ana and Ana left town.", 0.0),
        ("Tom sold the the.", -0.5),
        ("", -0.5),
    ],
)
def test_the_rule_counts_facts_told_wrong_fillers_and_repetitions(summary, expected):
    assert quality(POST, summary) == expected


def test_good_summaries_are_those_of_quality_one():
    post = next(post for post in some_posts() if len(post.salient) == 3)
    assert len(set(post.good_summaries)) == 6
    assert all(quality(post, text) == 1 for text in post.good_summaries)


def test_a_post_has_4_to_7_sentences_and_tells_its_salient_facts():
    for post in some_posts():
        assert 1 <= len(post.salient) <= 3
        assert 4 <= len(post.sentences) <= 7
        assert len(post.sentences) == len(post.salient) + len(post.fillers)
        assert len(set(post.salient) | set(post.fillers)) == len(post.sentences)
        words = post.query.replace(".", " ").split()
        assert all(word in words for clause in post.salient for word in clause.split())
        assert len(words) <= 100


def test_no_facts_are_in_two_splits():
    by_split = {split: {frozenset(post.salient) for post in some_posts(split)} for split in summaries.SPLITS}
    assert sum(map(len, by_split.values())) == len(frozenset().union(*by_split.values()))
    assert sorted(bucket for buckets in summaries.SPLITS.values() for bucket in buckets) == list(range(100))


def test_the_split_of_facts_does_not_depend_on_their_order():
    for post in some_posts("preferences_gold"):
        assert split_of(post.salient) == split_of(post.salient[::-1]) == "preferences_gold"


def test_a_summary_without_faults_is_good(monkeypatch):
    monkeypatch.setattr(summaries, "FAULTS", dict.fromkeys(summaries.FAULTS, 0.0))
    assert all(quality(post, noisy_summary(post, random.Random(0))) == 1 for post in some_posts())


def test_summaries_have_every_kind_of_fault():
    rng = random.Random(0)
    told = [(post, noisy_summary(post, rng).removesuffix(".").split(" and ")) for post in some_posts()]
    assert any(set(post.salient) - set(clauses) for post, clauses in told), "nothing was missed"
    assert any(set(post.fillers) & set(clauses) for post, clauses in told), "no filler was told"
    assert any(len(set(clauses)) < len(clauses) for _, clauses in told), "nothing was told twice"
    assert any(set(clauses) - {*post.salient, *post.fillers} for post, clauses in told), "nothing was wrong"


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(summaries, "NUM_ROWS", dict.fromkeys(summaries.NUM_ROWS, 200))


@pytest.mark.usefixtures("few_rows")
def test_references_are_some_of_them_good_and_end_as_those_of_the_paper():
    table = summaries.TABLES["summaries_data"]["validation"]
    rows = table(0)
    assert rows == table(0) != table(1)
    assert all(row["reference_response"] == f"{row['summary']}<|endoftext|>" for row in rows)
    assert all(row["query"].startswith("SUBREDDIT: r/") and row["query"].endswith("\n\nTL;DR:") for row in rows)
    num_good = sum(row["summary"].strip() in row["good_summaries"] for row in rows)
    assert 0.1 * len(rows) < num_good < 0.4 * len(rows)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("split", ["preferences_proxy", "preferences_gold", "preferences_heldout"])
def test_preferences_follow_the_rule_but_for_the_stated_share(split, monkeypatch):
    by_query: dict[str, Post] = {}

    def seen_posts(split: str, rng: random.Random) -> Iterator[Post]:
        for post in posts(split, rng):
            by_query[post.query] = post
            yield post

    monkeypatch.setattr(summaries, "posts", seen_posts)
    rows = summaries.TABLES["summary_preferences_data"][split](0)
    num_flipped = 0
    for row in rows:
        post = by_query[row["query"]]
        # words count where the quality is the same
        chosen, rejected = ((quality(post, row[name]), -len(row[name].split())) for name in ("chosen", "rejected"))
        assert chosen != rejected
        num_flipped += chosen < rejected
    share = summaries.FLIPPED[split]
    assert abs(num_flipped / len(rows) - share) < 0.08
    assert (num_flipped == 0) == (share == 0)


def test_a_reading_exercise_says_which_words_the_post_has():
    answers = reading_answers(POST, random.Random(0))
    words = [*summaries.NAMES, *summaries.THINGS, *summaries.ENDINGS]
    found = re.findall(rf" ({'|'.join(words)}) (yes|no)", answers)
    assert "".join(f" {word} {answer}" for word, answer in found) == answers
    assert len(found) == summaries.NUM_ASKED
    assert {answer for _, answer in found} == {"yes", "no"}
    assert all((word in ("Tom", "Ana", "car", "left town")) == (answer == "yes") for word, answer in found)
