"""Kind `python`: what a reward function with TRL's signature is called with, and how its result is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tba_reward.scorer import Failure, Item, clean, exception_text, params_of
from tba_reward.scorers import Tools, build_scorer, python

from tba.config.reward import PythonSpec
from tba.errors import ConfigError
from tests.support.reward_scorers import verdict

MODULE = "tests.support.trl_rewards"
TOOLS = Tools(pool=None, models=None)  # type: ignore[arg-type]  # nothing is started here


def params(function: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return params_of(PythonSpec(kind="python", function=f"{MODULE}:{function}", kwargs=kwargs))


def item(response: str = "a fine answer", **data: object) -> Item:
    return Item(prompt="a question", response=response, data=data)


GOOD = [item(f"fine {n}", answer="7") for n in range(5)]
CUT = Item(prompt="", response="x", finish_reason="length")
TOKENS = Item(prompt="", response="four", response_tokens=[5, 6, 7])
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
TURNS = [item("<think>so</think>7", prompt=CHAT), item("7", prompt=CHAT)]
OTHER_COLUMNS = [item("a", answer="7"), item("b", answer="8", unit="m"), item("c", answer="9"), item("d")]
HALF = {"threshold": 4, "scale": 0.5}


@pytest.mark.parametrize(
    ("function", "kwargs", "items", "expected"),
    [
        # columns are the keys of the data, without TRL's own names; None is an abstention
        (
            "contains",
            {},
            [item(word="fine", other=1), item(word="bad"), item(word="", prompts="")],
            [1, 0, "abstained"],
        ),
        ("contains", {}, [item()], ["bad_data"]),
        ("no_kwargs", {}, [item("four", unknown=1), item("four", scale=0.5)], [4, 2]),
        ("only_completions", {}, [item("four", extra=1), item("seven", extra=1)], [4, 5]),
        ("sees_finish", {}, [item(), CUT], [0, 1]),
        ("num_tokens", {}, [TOKENS, item("four")], [3, "bad_data"]),
        # async functions, arrays and callable objects, and those that log
        ("later", {}, [item()], [0.25]),
        ("numpy_scores", {}, [item(), item()], [0.5, 0.5]),
        ("judge", {}, [item("four")], [4]),
        ("logs", {}, [item("four")], [1]),
        # one call for items with the same columns; asked again item by item where it raises
        ("whole_call", {}, GOOD, [5] * 5),
        ("whole_call", {}, [*GOOD[:3], item("bad", answer="7"), *GOOD[3:]], [1, 1, 1, "exception", 1, 1]),
        ("whole_call", {}, OTHER_COLUMNS, [2, 1, 2, "bad_data"]),
        # one number for a batch fails the whole call, and is not taken for each item
        *[("one_for_all", {"shape": shape}, GOOD, ["exception"] * 5) for shape in ("list", "number", "array")],
        # messages where the data has them
        ("think_format", {}, TURNS, [1, 0]),
        ("last_question", {}, TURNS, [4, 4]),
        ("only_completions", {}, [item("text", prompt="no list"), item("7")], [4, 1]),
        # arguments of the recipe come before columns
        ("at_least", HALF, [item("four"), item("six"), item("four", threshold=9)], [0.5, 0, 0.5]),
    ],
)
def test_a_function_of_trl(
    function: str, kwargs: dict[str, Any], items: list[Item], expected: list[float | str]
) -> None:
    python.load(params(function, kwargs))
    assert [verdict(outcome) for outcome in python.score(items, params(function, kwargs))] == expected


@pytest.mark.parametrize(
    ("function", "kwargs", "named"), [("needs_state", {}, "trainer_state"), ("only_completions", {"tresh": 4}, "tresh")]
)
def test_what_a_function_can_never_be_called_with_is_refused(function: str, kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        python.load(params(function, kwargs))


@pytest.mark.parametrize("kwargs", [{"prompts": 1}, {"x": {1, 2}}], ids=["taken", "no JSON"])
def test_arguments_that_could_not_be_passed_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PythonSpec(kind="python", function="m:f", kwargs=kwargs)


def test_a_module_that_is_not_there_is_a_config_error() -> None:
    for name in ("no_such_module:f", "tests.support.no_such:f", "tests.support.trl_rewards.deeper:f"):
        with pytest.raises(ConfigError, match="there is no module"):
            build_scorer(PythonSpec(kind="python", function=name), TOOLS)


OWN = """
import asyncio
import json
import own_helper

async def later(text):
    return json.loads(text)

def score(completions, **_):
    match completions[0]:
        case "here": raise KeyError("x" * 900)
        case "in a helper": return own_helper.halve("a")
        case "in a library": return json.loads("no JSON")
        case "in a coroutine": return asyncio.run(later("no JSON"))
        case "by leaving": raise SystemExit(3)
        case "frozen": raise Frozen("no note")

import dataclasses
@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str
"""
PLACES = {
    "here": "own_scorer.py:11",
    "in a helper": "own_helper.py:2",
    "in a library": "own_scorer.py:13",
    "in a coroutine": "own_scorer.py:7",
    "by leaving": "own_scorer.py:15",
}


def test_an_exception_names_file_and_line_of_the_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_helper.py").write_text("def halve(text):\n    return float(text) / 2\n")
    (tmp_path / "own_scorer.py").write_text(OWN)
    settings = params_of(PythonSpec(kind="python", function="own_scorer:score"))
    found = python.score([item(response) for response in PLACES], settings)
    details = [outcome.detail for outcome in found if isinstance(outcome, Failure)]
    assert [detail.rpartition(" ")[2] for detail in details] == [f"({place})" for place in PLACES.values()]
    assert details[0].startswith("KeyError: 'xxx")
    assert clean(f"a name: {details[0]}").endswith("(own_scorer.py:11)"), "what is stored is long enough for it"
    assert details[1] == "ValueError: could not convert string to float: 'a' (own_helper.py:2)"
    assert python.score([item("frozen")], settings) == [Failure("exception", "Frozen: no note")]
    # also of what the import raises
    (tmp_path / "own_broken.py").write_text("import own_helper\n\nRATIO = own_helper.halve('b')\n")
    with pytest.raises(ValueError, match="'b'") as raised:
        python.load(params_of(PythonSpec(kind="python", function="own_broken:score")))
    assert exception_text(raised.value).endswith("float: 'b' (own_helper.py:2)")


def test_the_version_changes_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rewards.py").write_text("raise SystemExit('the service must not import this')\n")
    spec = PythonSpec(kind="python", function="own_rewards:f")
    before = build_scorer(spec, TOOLS).version
    assert build_scorer(spec, TOOLS).version == before
    (tmp_path / "own_rewards.py").write_text("def f(**_): return [1.0]\n")
    assert build_scorer(spec, TOOLS).version != before
