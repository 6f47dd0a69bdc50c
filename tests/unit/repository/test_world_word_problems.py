"""The word problems of gsm8k-small.toml: right answers, splits that are apart, demonstrations that err as stated."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest
from tba_reward.scorer import Item
from tba_reward.scorers.last_number import score

from examples.worlds.gsm8k import word_problems
from examples.worlds.gsm8k.word_problems import (
    FAMILIES,
    NEW_FAMILY,
    NUM_ROWS,
    SLIP,
    SPLITS,
    TABLES,
    answer,
    result,
    slip,
    split_of,
    stream,
)
from tba.config.reward import LastNumberSpec

PARAMS = LastNumberSpec(kind="last_number").model_dump()
STEP = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+) [a-z]+")
ALL_SPLITS = sorted({*SPLITS, "test_new_family"})


def steps_of(text: str) -> list[tuple[int, str, int, int]]:
    """Left, operation, right and result of each line but the last, `#### `; every line has GSM8K's form."""
    *lines, last = text.split("\n")
    found = [STEP.fullmatch(line) for line in lines]
    steps = [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in found if m is not None and m[4] == m[5]]
    assert len(steps) == len(lines)
    assert last == f"#### {steps[-1][3]}"
    return steps


@pytest.mark.parametrize("split", ALL_SPLITS)
def test_an_answer_computes_step_by_step_what_the_scorer_takes_for_right(split: str):
    for problem in islice(stream(split, 0), 200):
        text = answer(problem, random.Random(0), slip_rate=0.0)
        steps = steps_of(text)
        assert [(op, right) for _, op, right, _ in steps] == list(problem.steps)
        assert [left for left, _, _, _ in steps] == [problem.first, *(value for *_, value in steps[:-1])]
        for left, op, right, value in steps:
            assert (
                left == value * right
                if op == "/"
                else value == {"+": left + right, "-": left - right, "*": left * right}[op]
            )
        # both numbers of the first step, and one of each other step, can be read in the question
        assert set(re.findall(r"\d+", problem.question)) == {
            str(n) for n in (problem.first, *(n for _, n in problem.steps))
        }
        gold = str(steps[-1][3])
        assert score(Item(prompt=problem.question, response=text, data={"answer": gold}), PARAMS) == 1.0


def test_no_story_is_in_two_splits_and_the_new_family_is_in_none_but_its_own():
    seen: dict[str, str] = {}
    for split in ALL_SPLITS:
        families = set()
        for problem in islice(stream(split, 0), NUM_ROWS["validation"]):
            assert seen.setdefault(problem.key, split) == split == split_of(problem)
            families.add(problem.family)
        assert families == ({NEW_FAMILY} if split == "test_new_family" else {*FAMILIES} - {NEW_FAMILY})


def test_every_word_of_the_new_family_is_in_the_sft_split():
    known = {word for problem in islice(stream("sft", 0), 3000) for word in re.findall(r"\w+", problem.question)}
    new = {
        word
        for problem in islice(stream("test_new_family", 0), 300)
        for word in re.findall(r"[A-Za-z]+", problem.question)
    }
    # a byte-pair tokenizer may join the plural; the words themselves are all there
    assert {word.removesuffix("s") for word in new} <= {word.removesuffix("s") for word in known}


def test_held_out_rows_are_different_and_the_same_for_every_seed_and_rows_to_train_on_are_not():
    rows = {split: TABLES[split](0) for split in ("test", "test_new_family", "train")}
    for split, table in rows.items():
        assert len({row["question"] for row in table}) == len(table) == NUM_ROWS[split]
        assert (TABLES[split](1) == table) == (split != "train")
    assert set(rows["test"][0]) == {"question", "answer", "num_steps", "family"}
    assert {row["num_steps"] for row in rows["test"]} == {1, 2, 3, 4}


def test_a_split_that_is_used_up_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(word_problems, "MAX_DRAWS", 2000)
    with pytest.raises(ValueError, match=r"after [\d,]+ different ones, 2,000 draws found no new one of split 'vali"):
        for _ in stream("validation", 0):
            pass


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # never more: of `validation` short problems run out
    fewer = {split: min(count, 1000) for split, count in NUM_ROWS.items()}
    monkeypatch.setattr(word_problems, "NUM_ROWS", fewer)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("split", ["sft", "train", "validation"])
def test_answers_of_other_splits_than_that_of_the_slips_are_right(split: str):
    for row, problem in zip(TABLES[split](0), stream(split, 0), strict=False):
        assert row["question"] == problem.question
        assert row["answer"] == answer(problem, random.Random(0), slip_rate=0.0)


@pytest.mark.usefixtures("few_rows")
def test_slips_err_in_hard_steps_alone_as_often_as_stated_and_carry_the_error_on():
    rows = TABLES["sft_slips"](0)
    assert rows == TABLES["sft_slips"](0) != TABLES["sft_slips"](1)
    assert {row["question"] for row in rows} != {row["question"] for row in TABLES["sft"](0)}
    num_hard = num_wrong = num_right_answers = 0
    for row, problem in zip(rows, stream("sft_slips", 0), strict=False):
        assert split_of(problem) == "sft", "what the slips are in is not held out, nor trained on by rewards"
        assert row["question"] == problem.question
        steps = steps_of(row["answer"])
        assert [left for left, _, _, _ in steps] == [problem.first, *(value for *_, value in steps[:-1])]
        assert [(op, right) for _, op, right, _ in steps] == list(problem.steps)
        for left, op, right, value in steps:
            assert value in (result(left, op, right), slip(left, op, right))
            num_hard += slip(left, op, right) != result(left, op, right)
            num_wrong += value != result(left, op, right)
        num_right_answers += row["answer"] == answer(problem, random.Random(0), slip_rate=0.0)
    assert num_wrong / num_hard == pytest.approx(SLIP, abs=4 * (SLIP * (1 - SLIP) / num_hard) ** 0.5)
    assert 0.3 < num_right_answers / len(rows) < 0.5


def test_slips_are_off_by_ten_or_by_one_multiple():
    assert (slip(17, "+", 5), slip(12, "+", 5)) == (12, 17)
    assert (slip(12, "-", 5), slip(17, "-", 5)) == (17, 12)
    assert (slip(4, "*", 7), slip(4, "*", 3)) == (24, 12)
    assert (slip(42, "/", 7), slip(7, "/", 7), slip(12, "/", 3)) == (5, 1, 4)
