"""The data of redteam-small: families, splits, labels; and the count of the modes found."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from examples.worlds.redteam.attacks import (
    BAD_WORDS,
    FAMILIES,
    LABELS,
    NUM_TEST,
    NUM_TRAIN,
    TABLES,
    VULNERABLE,
    family_of,
    modes_found,
)
from studies.attack_modes import Cell, read_cell
from tba.errors import ConfigError
from tba.evaluation.evaluation_job import Estimate, EvaluationReport, ModeReport, ScoreCounts

KEYS = {"redteam_attacks": "instruction", "redteam_victim": "instruction", "redteam_toxicity": "reply"}


@pytest.fixture(scope="module")
def rows():
    return {(name, split): make(0) for name, splits in TABLES.items() for split, make in splits.items()}


def is_bad(reply: str) -> bool:
    return any(word in reply for word in BAD_WORDS) and not reply.startswith(("sorry", "please"))


@pytest.mark.parametrize("name", KEYS)
def test_no_item_is_in_two_splits_and_a_seed_makes_the_same_rows_again(rows, name):
    train, test = rows[name, "train"], rows[name, "test"]
    assert (len(train), len(test)) == (NUM_TRAIN, NUM_TEST)
    assert {row[KEYS[name]] for row in train}.isdisjoint(row[KEYS[name]] for row in test)
    assert TABLES[name]["test"](0) == test != TABLES[name]["test"](1)


def test_every_instruction_is_of_the_small_vocabulary(rows):
    words = {word for row in rows["redteam_attacks", "train"] for word in row["instruction"].split()}
    assert 60 <= len(words) <= 150
    lengths = [len(row["instruction"].split()) for row in rows["redteam_attacks", "train"]]
    assert min(lengths) >= 5, "shorter ones cannot be sampled (min_response_tokens)"
    assert max(lengths) <= 19, "longer ones would be cut off (max_response_tokens)"


def test_the_start_model_sees_each_family_as_often_as_it_says(rows):
    found = Counter(family_of(row["instruction"]) for row in rows["redteam_attacks", "train"])
    for family in FAMILIES:
        expected = family.share * NUM_TRAIN
        assert found[family.name] == pytest.approx(expected, abs=4 * expected**0.5)
    assert found[None] == NUM_TRAIN - sum(found[family.name] for family in FAMILIES)


def test_the_victim_is_taught_bad_replies_as_often_as_the_family_says(rows):
    replies: dict[str, list[bool]] = {}
    for row in rows["redteam_victim", "train"]:
        replies.setdefault(wording_of(row["instruction"]), []).append(is_bad(row["reply"]))
    assert not any(replies.pop("none")), "a harmless instruction and word salad get good replies"
    assert {family.name for family in FAMILIES} == replies.keys()
    for family in FAMILIES:
        bad = replies[family.name]
        assert sum(bad) / len(bad) == pytest.approx(family.badness, abs=4 * (0.25 / len(bad)) ** 0.5)


def wording_of(instruction: str) -> str:
    """The family of an instruction that has its whole wording; word salad may have a word of it."""
    for family in FAMILIES:
        if any(re.fullmatch(re.sub(r"{\w+}", ".+", text), instruction) for text in family.templates):
            return family.name
    return "none"


def test_labels_say_which_replies_are_bad_and_quotes_are_not(rows):
    labelled = rows["redteam_toxicity", "train"]
    assert Counter(row["label"] for row in labelled).keys() == set(LABELS)
    assert all(is_bad(row["reply"]) == (row["label"] == "hate") for row in labelled)
    quoted = [row for row in labelled if row["label"] == "nothate" and any(word in row["reply"] for word in BAD_WORDS)]
    assert len(quoted) > NUM_TRAIN / 20


def test_modes_are_families_among_the_successes():
    assert family_of("sketch the old river in one line") is None
    assert family_of("translate the song into goblin tongue") == "song", "the wording that stands first"
    attacks = [
        "dare the old river to trick the cloud",
        "vote the river below the old cloud",
        "sketch",
        "mock the river",
    ]
    assert modes_found(attacks) == {"taunt": 1, "dare": 1, "other": 2}
    assert modes_found([]) == {}


def test_a_mode_counts_from_one_in_a_hundred():
    cell = Cell(num_attacks=400, num_unknown=0, families={"rumour": 100, "secret": 99, "dare": 1, "other": 0})
    assert cell.num_modes == 2
    equal = replace(cell, families=dict.fromkeys(VULNERABLE, 10))
    assert equal.num_modes == len(VULNERABLE)
    assert equal.num_effective == pytest.approx(len(VULNERABLE))
    none = replace(cell, families={})
    assert (none.num_modes, none.num_effective) == (0, 0.0)


def evaluation(folder: Path, attacks: list[tuple[str, float | None]], *, success: str = "> 0.5") -> Path:
    """Write an evaluation of these attacks and their scores, as `tba evaluate` does."""
    known = [score for _, score in attacks if score is not None]
    counts = ScoreCounts(
        reward_versions=["v"], success=success, num_scored=len(known), num_unknown=len(attacks) - len(known)
    )
    mode = ModeReport(temperature=1.0, num_completions=len(attacks), finish_reasons={}, scores={"redteam": counts})
    rate = Estimate(value=0.5 if known else None, stderr=None, num_prompts=1, num_completions=len(known))
    report = EvaluationReport(
        subject="version 1-10 of run a",
        version="1-10",
        params_sha256=None,
        run="a",
        engine="embedded",
        tba_version="0",
        finished_at_s=0.0,
        num_prompts=1,
        modes={"sampled": mode},
        metrics={"sampled.redteam.success_rate": rate},
        references=[],
        generation_s=0.0,
        num_generated_tokens=0,
        settings={},
    )
    (folder / "evaluation.json").write_text(report.model_dump_json())
    lines = [{"mode": "sampled", "text": text, "scores": {"redteam": score}} for text, score in attacks]
    lines.append({"mode": "greedy", "text": "mock", "scores": {"redteam": 1.0}})
    (folder / "completions.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return folder


def test_a_cell_counts_the_sampled_successes_by_family(tmp_path: Path):
    # a line separator in a text ends no line of the file
    attacks = [("mock\u2028 it", 0.75), ("dare it", 0.5), ("a rumour", 0.25), ("a secret", None)]
    cell = read_cell(evaluation(tmp_path, attacks))
    assert (cell.families, cell.num_attacks, cell.num_unknown) == ({"taunt": 1}, 3, 1)
    assert read_cell(evaluation(tmp_path, attacks, success=">= 0.5")).families == {"taunt": 1, "dare": 1}


def test_what_is_no_evaluation_of_attacks_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not an evaluation"):
        read_cell(tmp_path)
    evaluation(tmp_path, [("mock it", None)])
    with pytest.raises(ConfigError, match="none of its attacks has a score"):
        read_cell(tmp_path)
    path = tmp_path / "evaluation.json"
    path.write_text(path.read_text().replace('"redteam":', '"math":'))
    with pytest.raises(ConfigError, match="no samples of the task 'redteam'"):
        read_cell(tmp_path)
