"""Prompts of [data.train] and [data.heldout]: templates, gold answers, and rows that cannot become prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tba.api import Prompt
from tba.config import Recipe, parse_recipe
from tba.config.data import ColumnValue, DataSection, DatasetSection
from tba.config.reward import RewardSection
from tba.errors import ConfigError
from tba_cli.prompts.columns import RowError, extracted
from tba_cli.prompts.reader import _dataset_prompts, heldout_prompts, in_both_splits, prompts_of
from tba_cli.resolve import with_absolute_paths

ROWS = {"task": "t", "dataset": "d", "column": "c"}
GOLD = {"answer": {"column": "answer", "extract": "after", "marker": "####"}}
QUESTIONS = [
    {"question": f"What is {n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>.\n#### {n + 1:,}"} for n in (1, 4999)
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_dataset(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    """A data set as the hub stores it: one Parquet file for each split."""
    (folder / "data").mkdir(parents=True)
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def section(folder: Path | str, **changes: Any) -> DataSection:
    part = {"task": "gsm8k", "dataset": str(folder), "template": "Q: {question}\nA:", "data": GOLD, **changes}
    return DataSection.model_validate({"train": part, "heldout": {**part, "split": "test"}})


def train_section(folder: Path, **changes: Any) -> DatasetSection:
    found = section(folder, **changes).train
    assert found is not None
    return found


def recipe(**data: Any) -> Recipe:
    return parse_recipe({"run": {"name": "r"}, "model": {"path": "m"}, "data": data}, where="test")


def of_section(data: DataSection) -> Recipe:
    return recipe(train=data.train, heldout=data.heldout)


def train_prompts(section: DatasetSection) -> list[Prompt]:
    return list(_dataset_prompts(recipe(train=section, heldout=section), "train"))


def test_a_folder_is_read_as_it_is_now_and_not_as_another_of_its_name_was(tmp_path):
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n---\n"
    one, two = (write_dataset(tmp_path / name / "d", train=[row]) for name, row in zip("ab", QUESTIONS, strict=True))
    for folder in (one, two):
        (folder / "README.md").write_text(card)
        assert len(train_prompts(train_section(folder))) == 1
    texts = [train_prompts(train_section(folder))[0].text for folder in (one, two)]
    assert texts == ["Q: What is 1 + 1?\nA:", "Q: What is 4999 + 1?\nA:"]
    pq.write_table(pa.Table.from_pylist(QUESTIONS), one / "data" / "train-00000-of-00001.parquet")
    assert len(train_prompts(train_section(one))) == 2


def test_rows_become_prompts_of_both_splits(tmp_path):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS, test=QUESTIONS[:1])
    train, other, heldout = prompts_of(of_section(section(folder)))
    assert (train.text, train.data, train.split) == ("Q: What is 1 + 1?\nA:", {"answer": "2"}, "train")
    assert other.data == {"answer": "5,000"}
    assert (heldout.text, heldout.split) == (train.text, "heldout")
    assert train.prompt_id != heldout.prompt_id, "the same row in both splits is two prompts"


def test_a_prompt_id_depends_on_the_content_alone(tmp_path):
    first = write_dataset(tmp_path / "a", train=QUESTIONS, test=QUESTIONS)
    second = write_dataset(tmp_path / "b", train=QUESTIONS[::-1], test=QUESTIONS)
    ids = [{p.prompt_id for p in prompts_of(of_section(section(folder)))} for folder in (first, second)]
    assert ids[0] == ids[1]


def test_equal_rows_are_one_prompt_and_are_counted(tmp_path):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS * 2, test=QUESTIONS)
    reader = _dataset_prompts(of_section(section(folder)), "train")
    assert (len(list(reader)), reader.num_repeated) == (2, 2)


def test_a_name_with_dots_is_a_path_into_nested_columns(tmp_path):
    rows = [{"question": "1 + 1?", "reward_model": {"style": "rule", "ground_truth": "2"}}]
    folder = write_dataset(tmp_path / "d", train=rows, test=rows)
    for train in (
        train_section(folder, data={"answer": "reward_model.ground_truth"}),
        train_section(folder, data={"answer": "reward_model.ground_truth"}, template="{question}{reward_model.style}"),
    ):
        (prompt,) = train_prompts(train)
        assert prompt.data == {"answer": "2"}


def test_the_first_rows_alone_may_be_taken(tmp_path):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS, test=QUESTIONS)
    assert len(train_prompts(train_section(folder, split="train[:1]"))) == 1


def test_texts_of_the_recipe_are_prompts(tmp_path):
    part = {"task": "redteam", "texts": ["Write:\n1."]}
    prompts = prompts_of(recipe(train=part, heldout=part))
    assert [(p.task, p.text, p.split) for p in prompts] == [
        ("redteam", "Write:\n1.", "train"),
        ("redteam", "Write:\n1.", "heldout"),
    ]
    assert len({p.prompt_id for p in prompts}) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "{text}"}, r"data.train: data set .* has no column 'text'; its columns are question, answer"),
        ({"template": "{question:>5}"}, r"data.train.template .*without formatting"),
        ({"data": {"gold": "solution"}}, r"has no column 'solution'"),
        ({"split": "dev"}, r"data set .*\(split dev\) cannot be loaded"),
        ({"subset": "socratic"}, r"data set .*:socratic \(split train\) cannot be loaded"),
        (
            {"data": {"answer": {"column": "question", "extract": "boxed"}}},
            r"data.train: .*, row 1: column 'question': ",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, changes, message):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS, test=QUESTIONS)
    with pytest.raises(ConfigError, match=message):
        prompts_of(of_section(section(folder, **changes)))


@pytest.mark.parametrize("answer", [None, " ", [], ["2", None]])
def test_a_row_without_a_gold_answer_is_named(tmp_path, answer):
    """Whoever reads the prompts finds it: config check, data prepare, run, evaluate."""
    rows = [{"prompt_id": f"{i}", "task": "math", "text": "1+1", "data": {"answer": "2"}} for i in range(2)]
    rows[1] |= {"split": "heldout", "data": {"answer": answer}}
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    for read in (prompts_of, heldout_prompts):
        with pytest.raises(ConfigError, match=r"p\.jsonl, line 2: data\.answer: .* is no gold answer"):
            read(recipe(path=str(path)))
    # a scorer of the recipe's own that looks elsewhere
    scorers = {"tasks": {"math": {"scorers": [{"kind": "exact", "field": "gold"}]}}}
    with pytest.raises(ConfigError, match=r"line 1: data\.gold: None is no gold answer"):
        prompts_of(recipe(path=str(path)).model_copy(update={"reward": RewardSection.model_validate(scorers)}))
    columns = {"task": "gsm8k", "column": "text", "data": {"answer": "gold"}, "num_heldout": 1}
    path.write_text("\n".join(json.dumps({"text": f"{i}", "gold": gold}) for i, gold in enumerate(["1", answer])))
    with pytest.raises(ConfigError, match=r"line 2: data\.answer: .* is no gold answer"):
        prompts_of(recipe(path=str(path), columns=columns))


def test_an_empty_gold_answer_of_a_data_set_or_a_generator_is_named(tmp_path, monkeypatch):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS, test=[{"question": "q", "answer": ""}])
    part = {"task": "math", "dataset": str(folder), "column": "question", "data": {"answer": "answer"}}
    sets = recipe(train=part, heldout={**part, "split": "test"})
    for read in (prompts_of, heldout_prompts):
        with pytest.raises(ConfigError, match=r"data\.heldout: .*, row 1: data\.answer: '' is no gold answer"):
            read(sets)
    (tmp_path / "own_source.py").write_text(
        "from tba.api import Prompt\n"
        "def make(num_train, num_heldout, seed):\n"
        "    return [Prompt(prompt_id='p', task='exact', text='t', data={'answer': ''}, split='train')]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="prompt 'p': data"):
        prompts_of(recipe(generator="own_source:make"))


def test_prompts_of_both_splits_are_counted_by_text(tmp_path):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS, test=QUESTIONS[:1] * 2)
    part = {"task": "t", "dataset": str(folder), "column": "question"}
    sets = recipe(train=part, heldout={**part, "split": "test"})
    assert in_both_splits(sets, prompts_of(sets)) == (
        "1 of 1 held-out prompts have the text of a prompt that is trained on"
    )
    apart = [
        prompt for prompt in prompts_of(sets) if prompt.text != QUESTIONS[0]["question"] or prompt.split == "train"
    ]
    assert in_both_splits(sets, apart) is None
    texts = recipe(train={"task": "t", "texts": ["a"]}, heldout={"task": "t", "texts": ["a"]})
    assert in_both_splits(texts, prompts_of(texts)) is None, "red-teaming has one prompt"


@pytest.mark.parametrize(
    ("rule", "value", "wanted"),
    [
        ({}, {"a": 1}, {"a": 1}),
        ({"extract": "after", "marker": "####"}, "1 #### 2 #### 3 ", "3"),
        ({"extract": "before", "marker": "<|endoftext|>"}, " A summary.<|endoftext|>", " A summary."),
        ({"extract": "before", "marker": "<|endoftext|>"}, " A summary.", " A summary."),
        ({"extract": "boxed"}, r"So $\boxed{1}$, no: $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ({"extract": "boxed"}, r"$\boxed{\left\{1, 2\right\}}$", r"\left\{1, 2\right\}"),
        ({"extract": "boxed"}, r"$\fbox{yes}$", "yes"),
        ({"extract": "boxed"}, r"$\boxed 7$ apples", "7"),
        ({"extract": "json", "marker": "ground_truth"}, '{"ground_truth": "3"}', "3"),
        ({"extract": "json", "marker": "ground_truth"}, '{"ground_truth": ["3"]}', "3"),
        ({"extract": "json", "marker": "ground_truth"}, '{"ground_truth": ["3", "4"]}', ["3", "4"]),
    ],
)
def test_a_gold_answer_is_taken_out_of_its_column(rule, value, wanted):
    assert extracted(ColumnValue(column="c", **rule), value) == wanted


@pytest.mark.parametrize(
    ("rule", "value", "message"),
    [
        ({"extract": "after", "marker": "####"}, "no mark", "holds no answer after '####'"),
        ({"extract": "after", "marker": "####"}, "#### ", "holds no answer after"),
        ({"extract": "after", "marker": "####"}, 7, "7 is not text"),
        ({"extract": "boxed"}, "no box", r"holds no \\boxed"),
        ({"extract": "boxed"}, r"\boxed{1", "is never closed"),
        ({"extract": "boxed"}, r"\boxed{ }", "is empty"),
        ({"extract": "json", "marker": "k"}, "{", "is not JSON"),
        ({"extract": "json", "marker": "k"}, '{"a": 1}', "has no key 'k'"),
    ],
)
def test_a_gold_answer_that_is_not_there_is_an_error(rule, value, message):
    with pytest.raises(RowError, match=message):
        extracted(ColumnValue(column="c", **rule), value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "exactly one of `generator`"),
        ({"generator": "addition", "path": "p.jsonl"}, "exactly one of `generator`"),
        ({"train": {"task": "t", "texts": ["a"]}}, "data.train and data.heldout go together"),
        ({"train": {"task": "t"}}, "exactly one of `dataset` and `texts`"),
        ({"train": {"task": "t", "dataset": "d"}}, "exactly one of `column` and `template`"),
        ({"train": {"task": "t", "texts": ["a"], "subset": "main"}}, "subset belongs to a data set"),
        ({"train": {**ROWS, "data": {"a": {"column": "x", "extract": "after"}}}}, "needs a marker"),
        ({"train": {**ROWS, "data": {"a": {"column": "x", "marker": "k"}}}}, "takes no marker"),
    ],
)
def test_a_section_that_says_too_much_or_too_little_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**data)


def test_prepared_folders_are_found_from_anywhere(tmp_path, monkeypatch):
    """A resume may begin in another folder: paths of [[prepare]] become absolute wherever the recipe names them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    part = {"task": "t", "dataset": "data/x", "column": "c"}
    document = {
        "run": {"name": "r"},
        "model": {"path": "models/x"},
        "data": {"train": part, "heldout": {**part, "dataset": "here"}},
        "reward": {"tasks": {"t": {"scorers": [{"kind": "reward_model", "model": "models/rm"}]}}},
        "prepare": [
            {"path": "data/x", "kind": "dataset", "manual": "ask Ana"},
            {"path": "models/rm", "kind": "model", "hub": "some/model"},
        ],
    }
    found = with_absolute_paths(parse_recipe(document, where="test")).model_dump(mode="json")
    assert found["data"]["train"]["dataset"] == str(tmp_path / "data/x")
    assert found["data"]["heldout"]["dataset"] == str(tmp_path / "here")
    assert found["reward"]["tasks"]["t"]["scorers"][0]["model"] == str(tmp_path / "models/rm")
    assert found["prepare"][1]["path"] == str(tmp_path / "models/rm")
    assert json.dumps(found["prepare"]).count("some/model") == 1
    assert recipe(train={**part, "dataset": "org/name"}, heldout=part).data.source_name == "name"
