"""What `tba.run` writes beside a run: prompts, functions and a recipe that names them."""

from __future__ import annotations

import json
import linecache
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

import tba
from tba.api import Prompt
from tba.config import load_recipe
from tba.errors import ConfigError
from tba_cli.run_folder import RunFolder
from tba_cli.scripting.inputs import Inputs, prepare

ROWS = [
    {"prompt_id": f"p{n}", "task": "mine", "text": f"{n}+1=", "data": {"word": "a"}, "split": split}
    for n, split in enumerate(["heldout", "train", "train"])
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepared(recipe: Any = "quickstart", **given: Any) -> Inputs:
    values = {"objective": None, "rewards": None, "prompts": None, "sets": [], "resume": False, "fresh": False}
    return prepare(recipe, **(values | given))


def test_a_recipe_alone_is_passed_on_as_it_is():
    inputs = prepared(sets=['run.name="x"'])
    assert Path(inputs.recipe).name == "quickstart.toml"
    assert (inputs.folder.path, inputs.import_folders) == (Path.cwd() / "runs" / "x", [])
    assert list(Path.cwd().iterdir()) == []


def test_functions_and_prompts_are_written_beside_the_run():
    def contains(prompts, completions, word, **columns):
        return [float(each in text) for each, text in zip(word, completions, strict=True)]

    def own_loss(sequences, tokens, settings, beta):
        return -tokens.logprobs

    form = {"kind": "format", "pattern": "x", "weight": 0.1}
    inputs = prepared(prompts=ROWS, rewards=[contains, form], objective=own_loss, sets=['run.name="x"'])
    place = Path.cwd() / "runs" / ".python" / "x"
    assert sorted(path.name for path in place.iterdir()) == [
        "own_contains.py",
        "own_own_loss.py",
        "prompts.jsonl",
        "recipe.json",
    ]
    assert (inputs.recipe, inputs.import_folders) == (str(place / "recipe.json"), [str(place)])
    assert place.stat().st_mode & 0o777 == 0o700
    recipe = load_recipe(inputs.recipe)
    assert recipe.objective.preset == "own_own_loss:own_loss"
    assert (recipe.data.path, recipe.data.generator) == (str(place / "prompts.jsonl"), None)
    assert [(spec.kind, spec.part) for spec in recipe.reward.tasks["mine"].scorers] == [
        ("python", "contains"),
        ("format", "format"),
    ]
    assert [json.loads(line) for line in (place / "prompts.jsonl").read_text().splitlines()] == ROWS
    # the run is not there, so it may be begun again, and leaves nothing of what was there
    prepared(prompts=ROWS, rewards=[form], sets=['run.name="x"'])
    assert sorted(path.name for path in place.iterdir()) == ["prompts.jsonl", "recipe.json"]


def test_scorers_without_prompts_are_for_the_tasks_of_the_recipe():
    inputs = prepared(rewards=[{"kind": "exact"}], sets=['run.name="x"'])
    assert list(load_recipe(inputs.recipe).reward.tasks) == ["exact"]


def test_a_dict_is_a_recipe_too():
    document = {"run": {"name": "x"}, "model": {"path": Path("models/x")}, "data": {"generator": "addition"}}
    recipe = load_recipe(prepared(document, sets=["trainer.num_steps=7"]).recipe)
    assert (recipe.run.name, recipe.model.path) == ("x", "models/x")
    assert recipe.trainer.num_steps != 7, "overrides are passed on as they are"


def test_inputs_of_a_run_that_is_there_are_left_alone():
    folder = RunFolder(Path.cwd() / "runs" / "x")
    prepared(prompts=ROWS, rewards=[{"kind": "exact"}], sets=['run.name="x"'])
    folder.path.mkdir()
    folder.marker_path.touch()
    folder.recipe_path.write_text("{}")
    before = (Path("runs/.python/x/prompts.jsonl")).read_text()
    with pytest.raises(ConfigError, match="exists already"):
        prepared(prompts=ROWS[:2], rewards=[{"kind": "exact"}], sets=['run.name="x"'])
    with folder.acquire(resume=True, fresh=False), pytest.raises(ConfigError, match="is in progress"):
        prepared(prompts=ROWS[:2], rewards=[{"kind": "exact"}], sets=['run.name="x"'], resume=True)
    assert Path("runs/.python/x/prompts.jsonl").read_text() == before


@pytest.mark.parametrize("rows", [datasets.Dataset.from_list(ROWS), (Prompt.model_validate(row) for row in ROWS)])
def test_rows_of_the_kinds_that_people_have(rows: Any):
    place = Path(prepared(prompts=rows, rewards=[{"kind": "exact"}]).recipe).parent
    assert [json.loads(line) for line in (place / "prompts.jsonl").read_text().splitlines()] == ROWS


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompts": "prompts.jsonl"}, "prompts is a str; give a list of dicts"),
        ({"prompts": {"train": ROWS}}, "name one split of it"),
        ({"prompts": [ROWS[0], {**ROWS[1], "split": "test"}]}, r"prompts\[1\]: key 'split' has the value 'test'"),
        ({"prompts": [{"text": "a"}]}, r"prompts\[0\]: key 'prompt_id' is missing"),
        ({"prompts": [{**ROWS[0], "data": {"x": float("nan")}}]}, r"prompts\[0\]"),
        ({"rewards": []}, "rewards is empty"),
        ({"rewards": lambda prompts: []}, "give a list of them"),
        ({"rewards": [{"kind": "no"}]}, "reward.tasks"),
        ({"objective": "no_such_preset"}, "objective.preset"),
        ({"recipe": "no_such"}, "no recipe that ships with tba"),
        ({"recipe": {"run": {"name": {1}}}}, "recipe cannot be written as JSON"),
    ],
)
def test_what_cannot_be_used_is_a_sentence_and_writes_nothing(given: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        prepared(**given)
    assert list(Path.cwd().iterdir()) == []


def test_two_functions_of_one_name_are_refused():
    def one():
        def f(x):
            return 1

        return f

    def two():
        def f(x):
            return 2

        return f

    with pytest.raises(ConfigError, match="another function is called 'f' too"):
        prepared(prompts=ROWS, rewards=[one(), two()])


def test_a_run_that_is_not_there_is_a_sentence():
    with pytest.raises(ConfigError, match=r"there is no run 'x'"):
        tba.Run("x")
    with pytest.raises(ConfigError, match="no run is in progress"):
        tba.Run()
    with pytest.raises(ConfigError, match="not both"):
        tba.Run("x", url="http://localhost:1")
    with pytest.raises(ConfigError, match="token goes with url"):
        tba.Run("x", token="secret")


def test_a_run_that_is_there_is_not_begun_again():
    run = RunFolder(Path.cwd() / "runs" / "x")
    run.path.mkdir(parents=True)
    run.marker_path.touch()
    run.recipe_path.write_text("{}")
    with pytest.raises(ConfigError, match=r"exists already.*--resume.*--fresh"):
        tba.run("quickstart", name="x", prompts=ROWS, rewards=[{"kind": "exact"}])


LIGHT = """
import sys, tba
heavy = {"torch", "pandas", "pyarrow", "tba_cli", "pydantic"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert {"Run", "run"} <= set(dir(tba))
assert tba.Run.__name__ == "Run" and tba.run.__name__ == "run"
assert not {"torch", "pandas", "pyarrow"} & set(sys.modules)
try:
    tba.nothing
except AttributeError as error:
    print(error)
"""


def test_import_tba_stays_light():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "module 'tba' has no attribute 'nothing'\n"), done.stderr


ROOT = Path(__file__).resolve().parents[3]


def test_the_stub_names_what_the_module_gives():
    stub = (ROOT / "tba" / "__init__.pyi").read_text()
    for name in ("Run", "run"):
        assert f"import {name} as {name}" in stub
        assert getattr(tba, name) is not None
    assert "__version__: str" in stub


PAGE = (ROOT / "docs" / "python.md").read_text()


def test_the_functions_of_the_page_are_taken():
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def contains" in text]
    namespace: dict[str, Any] = {"__name__": "__main__", "pairs": [("a+b=", "a"), ("c+d=", "c")]}
    source = block.partition("run = tba.run")[0]
    linecache.cache["<page>"] = (len(source), None, source.splitlines(keepends=True), "<page>")
    exec(compile(source, "<page>", "exec"), namespace)
    inputs = prepared(
        rewards=[namespace["contains"]], objective=namespace["policy_gradient"], prompts=namespace["prompts"]
    )
    recipe = load_recipe(inputs.recipe)
    assert (list(recipe.reward.tasks), recipe.objective.preset) == (["words"], "own_policy_gradient:policy_gradient")
