"""Prompt files and chunks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tba.api import Prompt
from tba.config import Recipe, parse_recipe
from tba.config.data import DataSection
from tba.errors import ConfigError
from tba_cli.prompts.reader import PromptReader, chunks, heldout_prompts, prompts_of
from tba_cli.prompts.sources import open_file, open_source


def prompt(number: int, text: str = "1+1=", split: str = "train") -> dict:
    return {"prompt_id": f"p{number}", "task": "addition", "text": text, "data": {"answer": "2"}, "split": split}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def recipe_for(path: Path) -> Recipe:
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": str(path)}}
    return parse_recipe(document, where="test")


def read(path: Path) -> list[Prompt]:
    return list(PromptReader(open_file(path)))


def test_lines_become_prompts_and_empty_lines_are_skipped(tmp_path):
    prompts = read(write(tmp_path / "p.jsonl", prompt(0), "", prompt(1, split="heldout"), ""))
    assert [(p.prompt_id, p.split) for p in prompts] == [("p0", "train"), ("p1", "heldout")]


def test_a_mark_of_utf8_and_windows_line_ends_are_no_part_of_a_prompt(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(prompt(i)) for i in range(2)).encode() + b"\r\n\r\n")
    assert [p.prompt_id for p in read(path)] == ["p0", "p1"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([prompt(0), "{not json"], "line 2: it is not JSON"),
        (["[1, 2]"], r"line 1: \[1, 2\] is not a JSON object"),
        ([{"prompt_id": "p", "task": "addition"}], "line 1: text: Field required"),
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
        read(write(tmp_path / "p.jsonl", *lines))


def test_a_file_that_is_not_text_is_refused_with_the_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(prompt(0)).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2: it is not UTF-8 text"):
        read(path)


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet"])
def test_a_missing_file_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / name)


def test_other_kinds_of_files_and_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"suffix '\.csv'; give a \.jsonl or a \.parquet file"):
        open_source(str(tmp_path / "p.csv"), hf_split="train")
    with pytest.raises(ConfigError, match=r"was not made by datasets\.save_to_disk"):
        open_source(str(tmp_path), hf_split="train")


def test_a_parquet_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tba_cli.prompts.sources.MAX_UNPACKED_CHARS", 2**20)
    ids, text = pa.array([str(i) for i in range(2000)]), pa.array(["x" * 2**16])
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), text)
    same = pa.array(["train"] * 2000)
    columns = {"prompt_id": ids, "task": pa.array(["addition"] * 2000), "text": repeated, "split": same}
    pq.write_table(pa.table(columns), path := tmp_path / "small.parquet")
    assert path.stat().st_size < 2**16
    with pytest.raises(ConfigError, match="unpacks to more than"):
        read(path)


def test_parquet_holds_the_same_prompts_as_jsonl(tmp_path):
    rows = [prompt(0), prompt(1, split="heldout"), prompt(2) | {"data": {"hint": [1, {"deep": None}]}}, prompt(3)]
    as_text = [row | {"data": json.dumps(row["data"])} for row in rows]
    expected = read(write(tmp_path / "p.jsonl", *rows))
    assert read(write_parquet(tmp_path / "text.parquet", as_text)) == expected
    structs = read(write_parquet(tmp_path / "struct.parquet", [row for row in rows if "hint" not in row["data"]]))
    assert structs == [p for p in expected if "hint" not in p.data]


def test_null_in_a_table_is_what_the_row_does_not_have(tmp_path):
    rows = [
        {"prompt_id": "a", "task": "t", "text": "x", "data": {"answer": "1", "hint": None}, "split": None},
        {"prompt_id": "b", "task": "t", "text": "y", "data": {"answer": None, "hint": "h"}, "split": "heldout"},
        {"prompt_id": "c", "task": "t", "text": "z", "data": None, "split": None},
    ]
    prompts = read(write_parquet(tmp_path / "p.parquet", rows))
    assert [(p.prompt_id, p.data, p.split) for p in prompts] == [
        ("a", {"answer": "1"}, "train"),
        ("b", {"hint": "h"}, "heldout"),
        ("c", {}, "train"),
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "q", "answer": "a"}],
            "no column 'prompt_id', 'task', 'text'; its columns are question, answer",
        ),
        ([prompt(0), prompt(1) | {"text": None}], "row 2: text: Field required"),
        ([prompt(0) | {"data": "{x"}], "row 1: data: '{x' is not JSON"),
        ([prompt(0) | {"data": {"x": b"\x00"}}], r"row 1: data: b'\\x00' \(bytes\) is not JSON; make it text"),
        ([prompt(0), prompt(1), prompt(0)], "row 3: prompt_id 'p0' appears twice"),
    ],
)
def test_a_bad_parquet_file_is_refused_with_the_row(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        read(write_parquet(tmp_path / "p.parquet", rows))


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"p\.parquet cannot be read: "):
        read(write(tmp_path / "p.parquet", prompt(0)))


def test_a_parquet_file_with_a_damaged_page_is_refused_and_not_half_read(tmp_path):
    path = write_parquet(tmp_path / "p.parquet", [prompt(i, text=f"{i}" * 500) for i in range(50)])
    content = bytearray(path.read_bytes())
    content[200:3000] = bytes(2800)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"p\.parquet cannot be read: "):
        read(path)


def test_the_extra_is_named_when_a_library_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # python marks a missing module so
    with pytest.raises(ConfigError, match=r"needs pyarrow, which is not installed; install the extra `data`"):
        open_file(tmp_path / "p.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs datasets, which is not installed; install the extra `data`"):
        open_source("hf:openai/gsm8k:main", hf_split="train")


def test_a_run_needs_held_out_prompts(tmp_path):
    with pytest.raises(ConfigError, match="no prompt with split 'heldout'"):
        prompts_of(recipe_for(write(tmp_path / "p.jsonl", prompt(0))))


def test_the_prompts_of_a_recipe_may_be_parquet(tmp_path):
    rows = [prompt(0), prompt(1, split="heldout")]
    assert len(prompts_of(recipe_for(write_parquet(tmp_path / "p.parquet", rows)))) == 2


def test_chunks_keep_order_and_stay_below_both_limits():
    prompts = [Prompt.model_validate(prompt(number, text="x" * 100)) for number in range(2500)]
    by_count = list(chunks(prompts, max_chunk_bytes=10**9))
    assert [len(chunk) for chunk in by_count] == [1000, 1000, 500]
    by_size = list(chunks(prompts, max_chunk_bytes=2000))
    assert max(sum(len(p.model_dump_json()) for p in chunk) for chunk in by_size) <= 2000
    assert [p for chunk in by_size for p in chunk] == prompts


def test_a_prompt_above_the_limit_travels_alone():
    prompts = [Prompt.model_validate(prompt(number, text="x" * 100)) for number in range(3)]
    assert [len(chunk) for chunk in chunks(prompts, max_chunk_bytes=10)] == [1, 1, 1]


def test_a_line_with_other_columns_names_them_and_the_flags_that_map_them(tmp_path):
    path = write(tmp_path / "p.jsonl", {"question": "1+1", "answer": "2"})
    with pytest.raises(
        ConfigError, match=r"line 1: prompt_id: Field required; its columns are question, answer; .*--task"
    ):
        read(path)
    path = write(tmp_path / "q.jsonl", {"prompt_id": "p", "task": "addition"})
    with pytest.raises(ConfigError, match=r"text: Field required$"):
        read(path)


def recipe_with_columns(path: Path, model: Path | str = "m", **columns: object) -> Recipe:
    section = {"task": "math", "column": "prompt", "data": {"answer": "answer"}, "num_heldout": 2, **columns}
    data = {"path": str(path), "columns": section}
    return parse_recipe({"run": {"name": "r"}, "model": {"path": str(model)}, "data": data}, where="test")


def test_rows_in_the_format_of_trl_need_a_mapping_in_the_recipe_alone(tmp_path):
    rows = [{"prompt": f"What is {i}?", "answer": f"It is #### {i}", "source": "web"} for i in range(10)]
    data = {"answer": {"column": "answer", "extract": "after", "marker": "####"}}
    found = [
        prompts_of(recipe_with_columns(path, data=data))
        for path in (write(tmp_path / "p.jsonl", *rows), write_parquet(tmp_path / "p.parquet", rows))
    ]
    assert found[0] == found[1]
    assert [(p.text, p.data, p.task) for p in found[0]] == [
        (f"What is {i}?", {"answer": str(i)}, "math") for i in range(10)
    ]
    assert sum(p.split == "heldout" for p in found[0]) == 2


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
    rows = [{"prompt": [{"role": "user", "content": f"What is {i}?"}], "answer": str(i)} for i in range(5)]
    rows[0]["prompt"] = "as text"
    paths = write(tmp_path / "p.jsonl", *rows), write_parquet(tmp_path / "p.parquet", rows[1:])
    one, other = (prompts_of(recipe_with_columns(path, model)) for path in paths)
    assert [p.text for p in one] == ["as text", *(f"user: What is {i}?\nassistant:" for i in range(1, 5))]
    assert [(p.prompt_id, p.text, p.data) for p in other] == [(p.prompt_id, p.text, p.data) for p in one[1:]]

    with pytest.raises(ConfigError, match=r"and model\.path m holds no model yet"):
        prompts_of(recipe_with_columns(paths[0]))
    tokenizer.chat_template = None
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(model)
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 2: column 'prompt': .*, or a model with a chat template"):
        prompts_of(recipe_with_columns(paths[0], model))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_recipes import make

    folder = tmp_path_factory.mktemp("chat") / "model"
    make("llama_chat", folder, seed=0)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ m.role }}: {{ m.content + '' }}{{ ' (named)' if m.name is defined }}\n{% endfor %}"
        "{{ 'think' if enable_thinking | default(true) else 'answer' }}:"
    )
    return folder


def chat_row(number: int, *contents: object, role: str = "user", **keys: object) -> dict[str, object]:
    return {"prompt": [{"role": role, "content": content, **keys} for content in contents], "answer": str(number)}


def test_text_parts_of_a_content_are_joined_and_null_keys_are_absent(tmp_path, chat_model):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]
    rows = [chat_row(i, parts, [{"type": "text", "text": f"{i}"}], name=None) for i in range(3)]
    for path in (write(tmp_path / "p.jsonl", *rows), write_parquet(tmp_path / "p.parquet", rows)):
        texts = [prompt.text for prompt in prompts_of(recipe_with_columns(path, chat_model))]
        assert texts[2] == "user: What is 1 + 1?\nuser: 2\nthink:"


def test_the_chat_template_gets_its_arguments_wherever_prompts_are_read(tmp_path, chat_model, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    path = write_parquet(tmp_path / "rows" / "p.parquet", [chat_row(i, f"{i}") for i in range(4)])
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    recipe = recipe_with_columns(path, chat_model, **given)
    texts = {f"user: {i}\nanswer:" for i in range(4)}
    assert {prompt.text for prompt in prompts_of(recipe)} == texts
    assert {prompt.text for prompt in heldout_prompts(recipe)} < texts
    sets = {"task": "math", "column": "prompt", "data": {"answer": "answer"}, "dataset": str(path.parent), **given}
    data = DataSection.model_validate({"train": sets, "heldout": {**sets, "split": "train[:2]"}})
    assert [p.text for p in heldout_prompts(recipe.model_copy(update={"data": data}))] == sorted(texts)[:2]


def test_arguments_that_nothing_takes_are_refused(tmp_path, chat_model):
    path = write(tmp_path / "p.jsonl", *(chat_row(i, f"{i}") for i in range(3)))
    with pytest.raises(ConfigError, match="takes no 'enable_thinkin'; correct or remove it in chat_template_kwargs"):
        prompts_of(recipe_with_columns(path, chat_model, chat_template_kwargs={"enable_thinkin": False}))
    for own in ("tokenize", "add_generation_prompt", "conversation"):  # the call sets them itself
        with pytest.raises(ConfigError, match=f"takes no '{own}'"):
            prompts_of(recipe_with_columns(path, chat_model, chat_template_kwargs={own: False}))
    given = {"enable_thinking": False}
    texts = write(tmp_path / "t.jsonl", *({"prompt": f"{i}", "answer": "1"} for i in range(3)))
    with pytest.raises(ConfigError, match="column 'prompt' holds no messages"):
        prompts_of(recipe_with_columns(texts, chat_model, chat_template_kwargs=given))
    with pytest.raises(ConfigError, match="are for messages in `column`, and here is a `template`"):
        recipe_with_columns(texts, column=None, template="{prompt}", chat_template_kwargs=given)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat_row(2, "hi", None), r"message 2 \(user\): its content None is not text"),
        (chat_row(2, [{"type": "image", "url": "x"}]), r"message 1 \(user\): the part .*'image'.* is not text"),
        (chat_row(2, "hi", role="bad"), "no such role; correct them, or leave them out"),
    ],
)
def test_messages_that_make_no_text_are_named_with_row_and_column(tmp_path, chat_model, row, message):
    path = write(tmp_path / "p.jsonl", chat_row(0, "a"), chat_row(1, "b"), row)
    with pytest.raises(ConfigError, match=rf"p\.jsonl, line 3: column 'prompt'[,:] .*{message}"):
        prompts_of(recipe_with_columns(path, chat_model))


def test_a_name_with_dots_is_a_path_unless_a_column_has_it(tmp_path):
    """The layout of verl; what else a struct holds is not the answer."""
    rows = [
        {"question": {"text": f"{i}?"}, "reward_model": {"style": "rule", "ground_truth": str(i)}} for i in range(4)
    ]
    columns = {"column": "question.text", "data": {"answer": "reward_model.ground_truth"}}
    for path in (write(tmp_path / "p.jsonl", *rows), write_parquet(tmp_path / "p.parquet", rows)):
        found = prompts_of(recipe_with_columns(path, **columns))
        assert [(p.text, p.data) for p in found] == [(f"{i}?", {"answer": str(i)}) for i in range(4)]
        template = {"column": None, "template": "Q: {question.text}"}
        assert prompts_of(recipe_with_columns(path, **{**columns, **template}))[3].text == "Q: 3?"
    literal = [row | {"reward_model.ground_truth": f"own {i}"} for i, row in enumerate(rows)]
    for path in (write(tmp_path / "l.jsonl", *literal), write_parquet(tmp_path / "l.parquet", literal)):
        assert prompts_of(recipe_with_columns(path, **columns))[2].data == {"answer": "own 2"}
    columns["data"] = {"answer": "reward_model.gold"}
    with pytest.raises(ConfigError, match=r"line 1: column 'reward_model\.gold' is missing; its 'reward_model' has"):
        prompts_of(recipe_with_columns(tmp_path / "p.jsonl", **columns))
    columns["data"] = {"answer": "rewards.gold"}
    with pytest.raises(ConfigError, match="has no column 'rewards'"):
        prompts_of(recipe_with_columns(tmp_path / "p.parquet", **columns))


def test_a_mapping_that_does_not_fit_is_refused(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"prompt": f"{i}", "answer": "1"} for i in range(3)))
    with pytest.raises(ConfigError, match="column 'question' is missing; this row has prompt, answer"):
        prompts_of(recipe_with_columns(path, column="question"))
    with pytest.raises(ConfigError, match="num_heldout 3 of 3 prompts leaves none to train on"):
        prompts_of(recipe_with_columns(path, num_heldout=3))
    with pytest.raises(ConfigError, match="exactly one of `column` and `template`"):
        recipe_with_columns(path, template="{prompt}")
    with pytest.raises(ConfigError, match=r"\[data.columns\] in the recipe"):
        prompts_of(recipe_for(path))
