"""What `tba.run` writes beside a run: prompts, functions and a recipe that names them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import linecache
import math
import re
import statistics
import subprocess
import sys
import textwrap
import xml
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from xml.etree import ElementTree

import datasets
import pytest
from pydantic import Field

import tba
from tba.api import Prompt
from tba.config import load_recipe
from tba.environments import tool_of
from tba.errors import ConfigError
from tba_cli.run_folder import RunFolder
from tba_cli.scripting.inputs import Inputs, prepare
from tba_cli.scripting.own_functions import NamedFunction, named

ROWS = [
    {"prompt_id": f"p{n}", "task": "mine", "text": f"{n}+1=", "data": {"word": "a"}, "split": split}
    for n, split in enumerate(["heldout", "train", "train"])
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepared(recipe: Any = "quickstart", **given: Any) -> Inputs:
    return prepare(recipe, **given)


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
    names = ["own_contains.py", "own_own_loss.py", "prompts.jsonl", "recipe.json"]
    assert sorted(path.name for path in place.iterdir()) == names
    assert (inputs.recipe, inputs.import_folders) == (str(place / "recipe.json"), [str(place)])
    assert place.stat().st_mode & 0o777 == 0o700
    recipe = load_recipe(inputs.recipe)
    assert recipe.objective.preset == "own_own_loss:own_loss"
    assert (recipe.data.path, recipe.data.generator) == (str(place / "prompts.jsonl"), None)
    scorers = [(spec.kind, spec.part) for spec in recipe.reward.tasks["mine"].scorers]
    assert scorers == [("python", "contains"), ("format", "format")]
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


def buy(item: str) -> str:
    """Buy an item."""
    return item


class Shop:
    """A class of a module."""


def test_an_environment_and_tools_are_for_every_task_of_the_prompts():
    def sell(item: str) -> str:
        """Sell an item."""
        return item

    others = [{**row, "prompt_id": row["prompt_id"] + "b", "task": "other"} for row in ROWS]
    limit = "environments.mine.max_turns=3"
    given = {"environment": Shop, "tools": [sell, "shop:pay"], "sets": ['run.name="x"', limit]}
    inputs = prepared(prompts=ROWS + others, **given)
    assert sorted(path.name for path in Path(inputs.recipe).parent.glob("own_*")) == ["own_sell.py"]
    sections = load_recipe(inputs.recipe, sets=[limit]).environments
    assert {name: (it.environment, it.tools, it.max_turns) for name, it in sections.items()} == {
        "mine": (f"{__name__}:Shop", ["own_sell:sell", "shop:pay"], 3),
        "other": (f"{__name__}:Shop", ["own_sell:sell", "shop:pay"], 16),
    }
    # tasks of the recipe, whose limits stay
    document = {"run": {"name": "y"}, "model": {"path": "m"}, "data": {"sets": [{"task": "mine", "texts": ["a"]}]}}
    document |= {"environments": {"mine": {"environment": "old:Old", "max_turns": 5}}}
    (section,) = load_recipe(prepared(document, tools=[buy], sets=[limit]).recipe).environments.values()
    assert (section.environment, section.tools, section.max_turns) == ("old:Old", [f"{__name__}:buy"], 5)


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
        ({"environment": 3}, "environment is a int and not a class"),
        ({"environment": "no path"}, r"environments\.exact: environment 'no path' is not known"),
        ({"tools": buy}, "tools is one tool; give a list"),
        ({"tools": []}, "tools is empty"),
        ({"tools": [Shop]}, r"tools\[0\] is a class \(Shop\) and not a function"),
        ({"prompts": ROWS, "tools": [buy]}, r"environments\.mine has tools and no environment, and nothing scores"),
        ({"recipe": None, "prompts": ROWS}, "give either a recipe, or model and prompts"),
        ({"model": "m"}, "give either a recipe, or model and prompts"),
        ({"lora": True}, "lora goes with model"),
        ({"recipe": None, "model": "m"}, "prompts is a NoneType; give a list of dicts"),
        ({"recipe": None, "model": "m", "prompts": ROWS, "name": "math"}, "is scored by tba itself"),
        ({"recipe": None, "model": "m", "prompts": []}, "prompts holds no rows"),
        ({"recipe": None, "model": "m", "prompts": [{"prompt": "a", "x": {1}}]}, r"prompts\[0\] cannot be written"),
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
PAGE = (ROOT / "docs" / "python.md").read_text()


def test_the_function_of_the_page_is_written_with_its_imports(tmp_path: Path):
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def right" in text]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    source = block.partition("run = tba.run")[0]
    linecache.cache["<page>"] = (len(source), None, source.splitlines(keepends=True), "<page>")
    exec(compile(source, "<page>", "exec"), namespace)
    assert len(block.splitlines()) <= 20
    rows, right = namespace["rows"], imported(named(namespace["right"], what="rewards[0]"), tmp_path)
    answers = [[{"role": "assistant", "content": text}] for text in ("0 + 0 = 0.", "It is 2.", "")]
    assert right(answers, [row["answer"] for row in rows[:3]]) == [1.0, 0.0, 0.0]


OF_ENVIRONMENTS: Any = {"what": "environment", "may_be_class": True, "needs_types": True}


def in_notebook(source: str, name: str = "f", **outside: Any) -> Any:
    """Define a function or class as a cell of a notebook does."""
    text = textwrap.dedent(source)
    file = f"<cell {abs(hash(text))}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "__main__", **outside}
    exec(compile(text, file, "exec"), namespace)
    return namespace[name]


def imported(found: NamedFunction, folder: Path) -> Any:
    assert found.source is not None
    (folder / found.file_name).write_text(found.source)
    spec = importlib.util.spec_from_file_location("own", folder / found.file_name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own"] = module  # a dataclass looks there
    spec.loader.exec_module(module)
    return getattr(module, found.path.partition(":")[2])


def at_the_top(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


def test_a_function_of_a_module_is_named_by_it():
    found = named(at_the_top, what="objective")
    assert found.path == f"{__name__}:at_the_top"
    assert found.source is None
    assert found.import_folders == (str(Path(__file__).resolve().parents[len(__name__.split(".")) - 1]),)
    # every Python finds an installed package: its folder would hide the standard library
    assert named(pytest.approx, what="objective").import_folders == ()
    found = named(json.loads, what="objective")
    assert (found.path, found.import_folders) == ("json:loads", ())


def test_a_function_of_a_notebook_is_written_and_does_the_same(tmp_path: Path):
    function = in_notebook(
        '''
        def f(values: list[Missing], *, by: float = 2.0 * len("ab")) -> Tensor:
            """Its annotations name what services do not have."""
            import math

            def inner(value):
                return value * by if value > 1 else f([value + 1], by=by)[0]

            return [math.floor(inner(value)) for value in values if any(x == value for x in values)]
        '''
    )
    found = named(function, what="objective")
    assert (found.path, found.file_name, found.import_folders) == ("own_f:f", "own_f.py", ())
    again = imported(found, tmp_path)
    assert again([3, 0.5]) == function([3, 0.5]) == [12, 6]


def test_what_a_function_uses_of_modules_is_imported_there_too(tmp_path: Path):
    source = """
        def f(text, pattern=re.compile("[0-9]+"), most=math.inf):
            found = [tree.fromstring(f"<a>{each}</a>").text for each in pattern.findall(text)]
            return mean(int(each) for each in found), at_the_top([], found), most
        """
    outside = {"re": re, "math": math, "tree": ElementTree, "mean": statistics.mean}
    found = named(in_notebook(source, **outside, at_the_top=at_the_top), what="rewards[1]")
    assert imported(found, tmp_path)("3 and 5") == (4, [0.0, 0.0], math.inf)
    inside = named(in_notebook("def f(x):\n    return xml.etree.ElementTree.fromstring(x)", xml=xml), what="rewards[1]")
    assert "import xml.etree.ElementTree\n" in str(inside.source)
    # the folder of this file, and none of the standard library
    assert found.import_folders == named(at_the_top, what="objective").import_folders


CELL = '''
@dataclass
class Env(Base):
    """Its module has no file, as that of a notebook."""

    size: int = 2
    limit: ClassVar[int] = size + 1

    @property
    def doubled(self) -> Private:
        return self.size * 2

    @doubled.setter
    def doubled(self, value):
        self.size = math.floor(value / 2)

    def again(self) -> Env:
        return Env(super().start(self.size))

    def tool(self, item: Annotated[int, Field(ge=1)]) -> str:
        """Take an item."""
        return str(item)
'''


class Start:
    def start(self, size: int) -> int:
        return size + 1


def test_a_class_of_a_notebook_is_written_with_the_types_of_its_tools(tmp_path: Path):
    outside = {"dataclass": dataclasses.dataclass, "Base": Start, "math": math, "ClassVar": ClassVar}
    outside |= {"Annotated": Annotated, "Field": Field, "Private": 3, "size": 9, "doubled": 9}
    found = named(in_notebook(f"from __future__ import annotations\n{CELL}", "Env", **outside), **OF_ENVIRONMENTS)
    assert (found.path, found.import_folders) == ("own_Env:Env", named(Start, **OF_ENVIRONMENTS).import_folders)
    made = imported(found, tmp_path)()
    made.doubled = 9.0
    assert (made.size, made.again().size, made.limit) == (4, 5, 3)
    assert tool_of(made.tool).schema["function"]["parameters"]["properties"]["item"]["minimum"] == 1
    with pytest.raises(ConfigError, match=r"^environment: 'Env' uses 'Base', which is defined outside"):
        named(
            in_notebook(CELL, "Env", **outside | {"Base": in_notebook("class Base: x = 1", "Base")}), **OF_ENVIRONMENTS
        )


def test_the_types_of_a_tool_are_imported_and_those_of_a_scorer_are_not(tmp_path: Path):
    source = 'def f(x: Literal["a", "b"]) -> Path:\n    """Do."""\n    return x'
    function = in_notebook(f"from __future__ import annotations\n{source}", Literal=Literal, Path=Path)
    assert "Literal" not in str(named(function, what="rewards[0]").source).partition("def f")[0]
    written = imported(named(function, what="tools[0]", needs_types=True), tmp_path)
    assert tool_of(written).schema["function"]["parameters"]["properties"]["x"]["enum"] == ["a", "b"]


def test_any_other_name_from_outside_is_refused():
    def closed() -> Callable[..., Any]:
        limit = 3

        def f(values):
            return [value < limit for value in values]

        return f

    helper = in_notebook("def helper(x):\n    return x", "helper")
    for function, outer in [
        (in_notebook("def f(x, most=LIMIT):\n    return x", LIMIT=3), "LIMIT"),
        (in_notebook("def f(x):\n    return [helper(y) for y in x]", helper=helper), "helper"),
        (in_notebook("@keep\ndef f(x):\n    return x", keep=lambda g: g), "keep"),
        (in_notebook("def f(x):\n    return [PLACE / y for y in x]", PLACE=Path("x")), "PLACE"),
        (closed(), "limit"),
    ]:
        with pytest.raises(ConfigError, match=rf"rewards\[1\]: 'f' uses '{outer}'"):
            named(function, what="rewards[1]")


def test_what_is_no_function_of_its_own_is_refused():
    for value, says in [
        (in_notebook("f = lambda x: x"), "is not defined by a `def` of its own"),
        (functools.partial(at_the_top), "is a partial and not a function"),
        (Path, "is a class (Path) and not a function"),
        (3, "is a int and not a function"),
        ("".join, "is a builtin_function_or_method and not a function"),
    ]:
        with pytest.raises(ConfigError) as caught:
            named(value, what="objective")
        assert says in str(caught.value), value
        assert "objective" in str(caught.value)


def test_a_function_without_source_is_refused():
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(x):\n    return x", namespace)
    with pytest.raises(ConfigError, match="the source of 'f' cannot be read"):
        named(namespace["f"], what="objective")
