"""Prompts of files and of [[data.sets]]: text, gold answers, stable ids, what is held out, and what is refused."""

from __future__ import annotations

import datetime
import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from tba.api import Prompt
from tba.config import Recipe, parse_recipe
from tba.config.data import ColumnValue, DataSet
from tba.config.reward import RewardSection
from tba.errors import ConfigError
from tba_cli.prompts.columns import RowError, extracted, prompt_of, template_parts, text_of
from tba_cli.prompts.reader import chunks, heldout_prompts, prompt_warnings, prompts_of, prompts_of_file
from tba_cli.resolve import with_absolute_paths
from tba_cli.starter_models.convert import chat_texts

ROWS = {"task": "t", "dataset": "d", "column": "c"}
GOLD = {"answer": {"column": "answer", "extract": "after", "marker": "####"}}
BOXED = {"column": "question", "extract": "boxed"}
QUESTIONS = [
    {"question": f"What is {n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>.\n#### {n + 1:,}"} for n in (1, 4999)
]
ROW = {"question": "What is 2 + 2?", "answer": "4", "level": 3, "tags": ["sum", {"hard": False}]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_dataset(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    """A data set as the hub stores it: one Parquet file for each split."""
    (folder / "data").mkdir(parents=True)
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def recipe(model: Path | str = "m", **data: Any) -> Recipe:
    return parse_recipe({"run": {"name": "r"}, "model": {"path": str(model)}, "data": data}, where="test")


def of_sets(*sets: dict[str, Any], **data: Any) -> Recipe:
    return recipe(sets=list(sets), **data)


def questions(folder: Path | str, **changes: Any) -> dict[str, Any]:
    part = {"task": "gsm8k", "dataset": str(folder), "train": "train", "heldout": "test", "data": GOLD}
    return {**part, **({} if "column" in changes else {"template": "Q: {question}\nA:"}), **changes}


def trl_rows(path: Path, model: Path | str = "m", **changes: Any) -> Recipe:
    """A file in TRL's format: nothing in it says what is held out."""
    part = {"task": "math", "dataset": str(path), "column": "prompt", "data": {"answer": "answer"}, **changes}
    return recipe(model, sets=[part], num_heldout=2)


def math(**changes: Any) -> DataSet:
    part = {"task": "math", "dataset": "d", "data": {"gold": "answer"}, **changes}
    return DataSet.model_validate(part if "template" in part else {"column": "question", **part})


def of_row(section: DataSet, row: dict[str, Any]) -> Prompt:
    text = text_of(section, row)
    assert isinstance(text, str)
    return prompt_of(section, "train", text, row)


def test_a_folder_is_read_as_it_is_now_and_not_as_another_of_its_name_was(tmp_path):
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n---\n"
    folders = [write_dataset(tmp_path / name / "d", train=[row] * 3) for name, row in zip("ab", QUESTIONS, strict=True)]

    def read(folder: Path) -> list[str]:
        return [p.text for p in heldout_prompts(of_sets(questions(folder, train=None, heldout="train")))]

    for folder in folders:
        (folder / "README.md").write_text(card)
    assert [read(folder) for folder in folders] == [["Q: What is 1 + 1?\nA:"], ["Q: What is 4999 + 1?\nA:"]]
    pq.write_table(pa.Table.from_pylist(QUESTIONS), folders[0] / "data" / "train-00000-of-00001.parquet")
    assert len(read(folders[0])) == 2


def test_rows_become_prompts_of_both_splits(tmp_path):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS * 2, test=QUESTIONS[:1])
    train, other, heldout = prompts_of(of_sets(questions(folder)))  # equal rows are one prompt
    assert (train.text, train.data, train.split) == ("Q: What is 1 + 1?\nA:", {"answer": "2"}, "train")
    assert other.data == {"answer": "5,000"}
    assert (heldout.text, heldout.split) == (train.text, "heldout")
    assert train.prompt_id != heldout.prompt_id, "the same row in both splits is two prompts"


def test_several_data_sets_make_one_run(tmp_path):
    """As math.toml: what is held out is another data set, with other columns."""
    sums = write_jsonl(tmp_path / "sums.jsonl", *({"q": f"{i}+1", "a": str(i + 1)} for i in range(3)))
    test = write_jsonl(tmp_path / "test.jsonl", {"question": "1+1?", "answer": "#### 2"})
    first = {"task": "math", "dataset": str(sums), "column": "q", "data": {"answer": "a"}}
    both = of_sets(first, questions(test, train=None, heldout="train"))
    assert [(p.task, p.text, p.split) for p in prompts_of(both)] == [
        *(("math", f"{i}+1", "train") for i in range(3)),
        ("gsm8k", "Q: 1+1?\nA:", "heldout"),
    ]
    sums.unlink()
    assert len(heldout_prompts(both)) == 1, "what is trained on is not read"


def test_texts_of_the_recipe_are_prompts_of_both_splits():
    found = of_sets({"task": "redteam", "texts": ["Write:\n1."]})
    prompts = prompts_of(found)
    expected = [("redteam", "Write:\n1.", split) for split in ("train", "heldout")]
    assert [(p.task, p.text, p.split) for p in prompts] == expected
    assert len({p.prompt_id for p in prompts}) == 2
    warned = [text.partition(" ")[0] for text in prompt_warnings(found, prompts)]
    assert warned == ["sampling.prompts_per_batch"], "red-teaming has one prompt, in both splits"


# ---- one row --------------------------------------------------------------------------------------------------------


def test_the_id_depends_on_the_content_and_on_nothing_else():
    prompt = of_row(math(), ROW)
    assert (prompt.task, prompt.text, prompt.data, prompt.split) == ("math", ROW["question"], {"gold": "4"}, "train")
    # pinned: a resume of tomorrow must know the prompts of today
    assert prompt.prompt_id == "math-346157ac4bd69c5bc9bd"
    assert of_row(math(), dict(reversed(ROW.items()))).prompt_id == prompt.prompt_id
    assert of_row(math(), ROW | {"level": 4}).prompt_id == prompt.prompt_id
    for other in (ROW | {"question": "What is 2 + 3?"}, ROW | {"answer": "5"}):
        assert of_row(math(), other).prompt_id != prompt.prompt_id
    assert of_row(math(task="sums"), ROW).prompt_id.startswith("sums-")


def test_a_template_names_columns_and_keeps_braces():
    section = math(template="Level {level}. {question}\nAnswer in \\boxed{{}}: {question}")
    assert text_of(section, ROW) == "Level 3. What is 2 + 2?\nAnswer in \\boxed{}: What is 2 + 2?"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no column", "names no column"),
        ("{question", "expected '}'"),
        ("{}", "a column is named as"),
        ("{question!r}", "without formatting"),
        ("{level:>10}", "without formatting"),
    ],
)
def test_a_template_that_is_none_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        template_parts(template)


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({}, {"answer": "4"}, "column 'question' is missing; this row has answer"),
        ({}, ROW | {"question": 7}, "column 'question': 7 is not text"),
        ({}, ROW | {"question": None}, "column 'question': None is not text"),
        ({}, ROW | {"question": ""}, "text: '': String should have at least 1 character"),
        ({}, ROW | {"answer": float("nan")}, r"data: \{'gold': nan\}: "),
        ({"template": "{tags}"}, ROW, "column 'tags': .* is neither text nor a number"),
        ({"template": "{question.__class__}"}, ROW, r"column 'question\.__class__' is missing"),
        ({}, ROW | {"answer": datetime.date(2024, 1, 2)}, r"column 'answer': datetime.* \(date\) is not JSON"),
        ({}, ROW | {"answer": [{"x": {1: 2}}]}, "column 'answer': the key 1 is not text"),
    ],
)
def test_a_row_that_cannot_be_a_prompt_is_refused_with_column_and_value(changes, row, message):
    with pytest.raises(RowError, match=message):
        of_row(math(**changes), row)


def test_a_name_with_dots_is_a_path_unless_a_column_has_it(tmp_path):
    """The layout of verl; what else a struct holds is not the answer."""
    rows = [{"question": {"text": f"{i}?"}, "reward_model": {"style": "r", "ground_truth": str(i)}} for i in range(4)]
    literal = [row | {"reward_model.ground_truth": f"own {i}"} for i, row in enumerate(rows)]
    columns = {"column": "question.text", "data": {"answer": "reward_model.ground_truth"}}
    for name, content, answer in (("p", rows, "2"), ("l", literal, "own 2")):
        folder = write_dataset(tmp_path / name, train=content)
        for dataset in (write_jsonl(tmp_path / f"{name}.jsonl", *content), folder):
            found = prompts_of(trl_rows(dataset, **columns))
            assert (found[2].text, found[2].data) == ("2?", {"answer": answer})
    templated = {**columns, "column": None, "template": "Q: {question.text}"}
    assert prompts_of(trl_rows(folder, **templated))[3].text == "Q: 3?"
    with pytest.raises(ConfigError, match=r"line 1: column 'reward_model\.gold' is missing; its 'reward_model' has"):
        prompts_of(trl_rows(tmp_path / "p.jsonl", **{**columns, "data": {"answer": "reward_model.gold"}}))


# ---- what is held out -----------------------------------------------------------------------------------------------


def test_what_is_held_out_depends_on_the_ids_alone(tmp_path):
    rows = [{"prompt": f"What is {i}?", "answer": str(i), "source": "web"} for i in range(100)]
    found = [
        prompts_of(trl_rows(write_jsonl(tmp_path / name, *content)))
        for name, content in (("a.jsonl", rows), ("b.jsonl", random.Random(0).sample(rows, len(rows))))
    ]
    held_out = [{p.prompt_id for p in prompts if p.split == "heldout"} for prompts in found]
    assert (len(held_out[0]), held_out[0]) == (2, held_out[1])
    with pytest.raises(ConfigError, match=r"data\.num_heldout 2 of 2 prompts leaves none to train on"):
        prompts_of(trl_rows(write_jsonl(tmp_path / "c.jsonl", *rows[:2], *rows[:2])))


def test_prompts_of_both_splits_are_counted_by_text(tmp_path):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS, test=QUESTIONS[:1] * 2)
    sets = of_sets(questions(folder, column="question"))
    said = "held-out prompts have the text of a prompt that is trained on"
    assert next(prompt_warnings(sets, prompts_of(sets))).startswith(f"1 of 1 {said}")
    assert "text" not in " ".join(prompt_warnings(sets, [p for p in prompts_of(sets) if p.split == "train"]))
    beside = of_sets(questions(folder, column="question"), {"task": "redteam", "texts": ["Write:\n1."]})
    both = next(prompt_warnings(beside, prompts_of(beside)))
    assert both.startswith(f"1 of 2 {said}"), "texts of the recipe silence only themselves"


@pytest.mark.parametrize(
    ("batch", "num", "num_final", "said"),
    [
        (96, 32, 32, {}),
        (96, 128, 512, {}),  # the defaults are nobody's choice
        (5000, 33, 512, {"sampling.prompts_per_batch": ["5,000", "96", "52.1"], "eval.num_prompts": ["33", "32"]}),
        (96, 128, 64, {"eval.num_prompts_final": ["64", "32"]}),
    ],
)
def test_a_batch_or_an_evaluation_of_more_prompts_than_there_are_is_named(batch, num, num_final, said):
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "sampling": {"prompts_per_batch": batch}}
    document |= {"data": {"generator": "addition", "num_train": 96, "num_heldout": 32}}
    found = parse_recipe(document | {"eval": {"num_prompts": num, "num_prompts_final": num_final}}, where="test")
    warnings = [text.partition(" ") for text in prompt_warnings(found, prompts_of(found))]
    assert {key: re.findall(r"\b\d[\d,.]*\b", text) for key, _, text in warnings} == said


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat_model(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose conversations are rendered in this process: a program imports transformers for seconds."""

    def run(_module: str, words: list[str]) -> str:
        return json.dumps(chat_texts(Path(words[1]), json.loads(Path(words[-1]).read_bytes()), json.loads(words[3])))

    monkeypatch.setattr("tba_cli.child_processes.run_program", run)
    return saved_model


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_reward_models import save_chat_model

    folder = tmp_path_factory.mktemp("chat") / "model"
    save_chat_model(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ m.role }}: {{ m.content + '' }}{{ ' (named)' if m.name is defined }}\n{% endfor %}"
        "{{ 'think' if enable_thinking | default(true) else 'answer' }}:"
    )
    return folder


def chat_row(number: int, *contents: object, role: str = "user", **keys: object) -> dict[str, Any]:
    return {"prompt": [{"role": role, "content": content, **keys} for content in contents], "answer": str(number)}


def test_messages_become_text_by_the_models_chat_template(tmp_path):
    """The tokenizer puts a token before every text by itself: it is there once."""
    from tokenizers.processors import TemplateProcessing

    from tests.support.tiny_model import make_tiny_tokenizer

    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<pad>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    rows = [chat_row(i, f"What is {i}?") for i in range(5)]
    path = write_jsonl(tmp_path / "p.jsonl", rows[0] | {"prompt": "as text"}, *rows[1:])
    found = prompts_of(trl_rows(path, model))
    assert [p.text for p in found] == ["as text", *(f"user: What is {i}?\nassistant:" for i in range(1, 5))]

    with pytest.raises(ConfigError, match=r"and model\.path m holds no model yet"):
        prompts_of(trl_rows(path))
    tokenizer.chat_template = None
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(model)
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 2: column 'prompt': .*, or a model with a chat template"):
        prompts_of(trl_rows(path, model))


def test_a_prompt_keeps_its_messages_with_the_tools_of_the_column(tmp_path, chat_model):
    """As a JSONL file has them, as Parquet has them (with nulls), and as JSON in a text."""
    model = Path(shutil.copytree(chat_model, tmp_path / "m"))
    (model / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
    tools[0]["function"] |= {"description": "Add."}  # type: ignore[operator]
    rows = [chat_row(i, f"{i}") | {"tools": tools} for i in range(3)]
    texts = [{**row, "tools": json.dumps(tools)} for row in rows]
    jsonl = write_jsonl(tmp_path / "p.jsonl", *rows)
    for dataset in (jsonl, write_dataset(tmp_path / "d", train=rows), write_dataset(tmp_path / "e", train=texts)):
        found = prompts_of(trl_rows(dataset, model))
        assert {prompt.text for prompt in found} == {f"add sub {i} " for i in range(3)}
        assert all(prompt.tools == tools and prompt.messages for prompt in found)
    plain = write_jsonl(tmp_path / "t.jsonl", *({"prompt": f"{i}", "answer": "1", "tools": tools} for i in range(3)))
    assert [prompt.messages for prompt in prompts_of(trl_rows(plain, model))] == [None] * 3
    for wrong, message in (("{", "is not JSON"), ([1], "is no list of tools"), ({"a": 1}, "is no list of tools")):
        path = write_jsonl(tmp_path / "w.jsonl", rows[0], rows[1], rows[2] | {"tools": wrong})
        with pytest.raises(ConfigError, match=rf"w\.jsonl, line 3: column 'tools': .* {message}"):
            prompts_of(trl_rows(path, model))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match="it has no place for tools"):
        prompts_of(trl_rows(jsonl, model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"content": "a"}]}, "message 1 has role None, not one of system"),
        ({"messages": [{"role": "user", "content": None}]}, r"message 1 \(user\): its content is not text"),
        ({"messages": [{"role": "user", "content": "a", "number": float("nan")}]}, "not JSON compliant"),
        ({"tools": [{"name": "add"}]}, "are for messages"),
        ({"chat_template_kwargs": {"a": 1}}, "are for messages"),
    ],
)
def test_messages_that_no_template_takes_are_refused_at_upload(fields, message):
    with pytest.raises(ValidationError, match=message):
        Prompt(prompt_id="p", task="t", text="a", **fields)


def test_null_keys_of_messages_are_absent(tmp_path, chat_model):
    rows = [chat_row(i, "What is 1 + 1?", f"{i}", name=None) for i in range(3)]
    for dataset in (write_jsonl(tmp_path / "p.jsonl", *rows), write_dataset(tmp_path / "d", train=rows)):
        texts = [prompt.text for prompt in prompts_of(trl_rows(dataset, chat_model))]
        assert texts[2] == "user: What is 1 + 1?\nuser: 2\nthink:"


def test_the_chat_template_gets_its_arguments(tmp_path, chat_model):
    path = write_jsonl(tmp_path / "p.jsonl", *(chat_row(i, f"{i}") for i in range(4)))
    given = {"enable_thinking": False}
    found = trl_rows(path, chat_model, chat_template_kwargs=given)
    texts = {f"user: {i}\nanswer:" for i in range(4)}
    assert {prompt.text for prompt in prompts_of(found)} == texts
    assert {prompt.text for prompt in heldout_prompts(found)} < texts
    for own in ("enable_thinkin", "tokenize", "add_generation_prompt", "conversation"):  # the call sets most of them
        with pytest.raises(ConfigError, match=f"takes no '{own}'; correct or remove it in chat_template_kwargs"):
            prompts_of(trl_rows(path, chat_model, chat_template_kwargs={own: False}))
    plain = write_jsonl(tmp_path / "t.jsonl", *({"prompt": f"{i}", "answer": "1"} for i in range(3)))
    with pytest.raises(ConfigError, match="column 'prompt' holds no messages"):
        prompts_of(trl_rows(plain, chat_model, chat_template_kwargs=given))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat_row(2, "hi", None), r"message 2 \(user\): its content None is not text"),
        (chat_row(2, [{"type": "image", "url": "x"}]), r"message 1 \(user\): its content .*'image'.* is not text"),
        (chat_row(2, "hi", role="bad"), "no such role; correct them, or leave them out"),
    ],
)
def test_messages_that_make_no_text_are_named_with_row_and_column(tmp_path, chat_model, row, message):
    path = write_jsonl(tmp_path / "p.jsonl", chat_row(0, "a"), chat_row(1, "b"), row)
    with pytest.raises(ConfigError, match=rf"p\.jsonl, line 3: column 'prompt'[,:] .*{message}"):
        prompts_of(trl_rows(path, chat_model))


# ---- gold answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, " ", [], ["2", None]])
def test_a_row_without_a_gold_answer_is_named(tmp_path, answer):
    """Whoever reads the prompts finds it: config check, data prepare, run, evaluate."""
    rows = [{"prompt_id": f"{i}", "task": "math", "text": "1+1", "data": {"answer": "2"}} for i in range(2)]
    rows[1] |= {"split": "heldout", "data": {"answer": answer}}
    path = write_jsonl(tmp_path / "p.jsonl", *rows)
    for read in (prompts_of, heldout_prompts):
        with pytest.raises(ConfigError, match=r"p\.jsonl, line 2: data\.answer: .* is no gold answer"):
            read(recipe(path=str(path)))
    # a scorer of the recipe's own that looks elsewhere
    scorers = {"tasks": {"math": {"scorers": [{"kind": "exact", "field": "gold"}]}}}
    with pytest.raises(ConfigError, match=r"line 1: data\.gold: None is no gold answer"):
        prompts_of(recipe(path=str(path)).model_copy(update={"reward": RewardSection.model_validate(scorers)}))


def test_an_empty_gold_answer_of_a_data_set_or_a_generator_is_named(tmp_path, monkeypatch):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS, test=[{"question": "q", "answer": ""}])
    sets = of_sets(questions(folder, task="math", column="question", data={"answer": "answer"}))
    for read in (prompts_of, heldout_prompts):
        with pytest.raises(ConfigError, match=r"\(split test\), row 1: data\.answer: '' is no gold answer"):
            read(sets)
    (tmp_path / "own_source.py").write_text(
        "from tba.api import Prompt\n"
        "def make(num_train, num_heldout, seed):\n"
        "    return [Prompt(prompt_id='p', task='exact', text='t', data={'answer': ''}, split='train')]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="prompt 'p': data"):
        prompts_of(recipe(generator="own_source:make"))


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


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "{text}"}, r"data set .*, row 1: column 'text' is missing; this row has question, answer"),
        ({"data": {"gold": "solution"}}, r"row 1: column 'solution' is missing"),
        ({"train": "dev"}, r"data set .*\(split dev\) cannot be loaded"),
        ({"subset": "socratic"}, r"data set .*:socratic \(split train\) cannot be loaded"),
        ({"data": {"answer": BOXED}}, r"\(split train\), row 1: column 'question': "),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, changes, message):
    folder = write_dataset(tmp_path / "d", train=QUESTIONS, test=QUESTIONS)
    with pytest.raises(ConfigError, match=message):
        prompts_of(of_sets(questions(folder, **changes)))


def test_a_library_that_is_missing_and_a_split_of_a_file_are_named(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "q.jsonl", *QUESTIONS)
    with pytest.raises(ConfigError, match=r"q\.jsonl has the split `train` alone"):
        prompts_of(of_sets(questions(path)))
    monkeypatch.setitem(sys.modules, "datasets", None)  # python marks a missing module so
    with pytest.raises(ConfigError, match="pip install datasets"):
        prompts_of(of_sets(questions("org/name")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "exactly one of `generator`"),
        ({"generator": "addition", "path": "p.jsonl"}, "exactly one of `generator`"),
        ({"sets": [{"task": "t"}]}, "exactly one of `dataset`, `texts`"),
        ({"sets": [{"task": "t", "dataset": "d"}]}, "exactly one of `column` and `template`"),
        ({"sets": [{**ROWS, "template": "{c}"}]}, "exactly one of `column` and `template`"),
        ({"sets": [{"task": "t", "texts": ["a"], "subset": "main"}]}, "subset belongs to a data set"),
        (
            {"sets": [{"task": "t", "dataset": "d", "template": "{c}", "chat_template_kwargs": {"a": 1}}]},
            "are for messages in `column`, and here is a `template`",
        ),
        ({"sets": [{**ROWS, "data": {"a": {"column": "x", "extract": "after"}}}]}, "needs a marker"),
        ({"sets": [{**ROWS, "data": {"a": {"column": "x", "marker": "k"}}}]}, "takes no marker"),
    ],
)
def test_a_section_that_says_too_much_or_too_little_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**data)


def test_prepared_folders_are_found_from_anywhere(tmp_path, monkeypatch):
    """A resume may begin in another folder: paths of [[prepare]] become absolute wherever the recipe names them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    document = {
        "run": {"name": "r"},
        "model": {"path": "models/x"},
        "data": {"sets": [{**ROWS, "dataset": path} for path in ("data/x", "here", "org/name")]},
        "reward": {"tasks": {"t": {"scorers": [{"kind": "reward_model", "model": "models/rm"}]}}},
        "prepare": [
            {"path": "data/x", "kind": "dataset", "manual": "ask Ana"},
            {"path": "models/rm", "kind": "model", "hub": "some/model"},
        ],
    }
    found = with_absolute_paths(parse_recipe(document, where="test")).model_dump(mode="json")
    paths = [str(tmp_path / "data/x"), str(tmp_path / "here"), "org/name"]
    assert [part["dataset"] for part in found["data"]["sets"]] == paths
    assert found["reward"]["tasks"]["t"]["scorers"][0]["model"] == str(tmp_path / "models/rm")
    assert found["prepare"][1]["path"] == str(tmp_path / "models/rm")
    assert json.dumps(found["prepare"]).count("some/model") == 1
    assert of_sets({**ROWS, "dataset": "org/name"}).data.source_name == "name"


def test_what_is_no_folder_of_data_files_is_refused_in_one_sentence(tmp_path):
    parquet, saved = tmp_path / "rows.parquet", tmp_path / "saved"
    pq.write_table(pa.Table.from_pylist(QUESTIONS), parquet)
    datasets.Dataset.from_list(QUESTIONS).save_to_disk(saved)
    for path, sentence in ((parquet, "is a file"), (saved, "was written by save_to_disk")):
        with pytest.raises(ConfigError, match=sentence):
            prompts_of(of_sets(questions(path)))


def prompt(number: int, text: str = "1+1=", split: str = "train") -> dict[str, Any]:
    return {"prompt_id": f"p{number}", "task": "addition", "text": text, "data": {"answer": "2"}, "split": split}


def test_a_mark_of_utf8_and_windows_line_ends_are_no_part_of_a_prompt(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(prompt(i)) for i in range(2)).encode() + b"\r\n\r\n")
    assert [p.prompt_id for p in prompts_of_file(path)] == ["p0", "p1"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([prompt(0), "{not json"], "line 2: it is not JSON"),
        (["[1, 2]"], r"line 1: \[1, 2\] is not a JSON object"),
        ([{"prompt_id": "p", "task": "addition"}], "line 1: text: Field required$"),
        ([{"question": "1+1", "answer": "2"}], r"line 1: prompt_id: Field required; .* \[\[data\.sets\]\]"),
        ([prompt(0) | {"text": 7}], "line 1: text: 7: Input should be a valid string"),
        ([prompt(0) | {"answer": 3}], "line 1: answer: 3: Extra inputs are not permitted"),
        ([prompt(0) | {"data": None}], "line 1: data: None"),
        ([prompt(0), prompt(0)], "line 2: prompt_id 'p0' appears twice"),
        (['{"a": ' * 5000], "line 1: it is not JSON: recursion limit"),
        ([], "holds no prompts"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        prompts_of_file(write_jsonl(tmp_path / "p.jsonl", *lines))


def test_what_is_no_jsonl_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(prompt(0)).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2: it is not UTF-8 text"):
        prompts_of_file(path)
    with pytest.raises(ConfigError, match="No such file"):
        prompts_of_file(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"suffix '\.csv'; give a \.jsonl file"):
        prompts_of_file(tmp_path / "p.csv")


def test_a_run_needs_held_out_prompts(tmp_path):
    with pytest.raises(ConfigError, match="no prompt with split 'heldout'"):
        prompts_of(recipe(path=str(write_jsonl(tmp_path / "p.jsonl", prompt(0)))))


def test_chunks_keep_order_and_stay_below_both_limits():
    prompts = [Prompt.model_validate(prompt(number, text="x" * 100)) for number in range(2500)]
    by_count = list(chunks(prompts, max_chunk_bytes=10**9))
    assert [len(chunk) for chunk in by_count] == [1000, 1000, 500]
    by_size = list(chunks(prompts, max_chunk_bytes=2000))
    assert max(sum(len(p.model_dump_json()) for p in chunk) for chunk in by_size) <= 2000
    assert [p for chunk in by_size for p in chunk] == prompts
    assert [len(chunk) for chunk in chunks(prompts[:3], max_chunk_bytes=10)] == [1, 1, 1], "a larger one travels alone"
