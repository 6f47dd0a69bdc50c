"""`tba init`, and what `tba score` reads and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tba.api import ScoreError, ScoreItem, ScoreReply, ScoreResult
from tba.config import Recipe, load_recipe
from tba_cli.commands.score import Example, Scored, table_lines
from tba_cli.local import reward_trial
from tba_cli.main import main
from tba_cli.prompts.reader import prompts_of
from tba_cli.task_files import NUM_HELDOUT, NUM_TRAIN
from tests.support.buffer import make_recipe

# ---- `tba init` -----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_task_has_prompts_of_both_splits_for_the_task_of_its_recipe(place: Path, monkeypatch, capsys) -> None:
    assert main(["init", "sums", "--folder", "new/place", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    files = sorted(str(path.relative_to(place)) for path in (place / "new" / "place").iterdir())
    assert sorted(document["files"]) == files
    assert len(document["next"]) == 3
    monkeypatch.chdir(place / "new" / "place")
    recipe = load_recipe("sums.toml")
    prompts = prompts_of(recipe)
    num_heldout = sum(prompt.split == "heldout" for prompt in prompts)
    assert (len(prompts), num_heldout) == (NUM_TRAIN + NUM_HELDOUT, NUM_HELDOUT)
    assert {prompt.task for prompt in prompts} == set(recipe.reward.tasks) == {"sums"}
    assert all(len(prompt.text) <= recipe.searcher.max_prompt_tokens for prompt in prompts)
    assert recipe.eval.best_metric == "mean_reward"
    known = set("0123456789+=")
    assert all(set(prompt.text) <= known for prompt in prompts)


def test_nothing_is_overwritten(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "sums").mkdir()
    (place / "sums" / "notes").write_text("mine")
    assert main(["init", "sums"]) == 2
    assert "sums exists already, and nothing in it is overwritten" in capsys.readouterr().err
    assert [path.name for path in (place / "sums").iterdir()] == ["notes"]
    (place / "file").touch()
    assert main(["init", "sums", "--folder", "file"]) == 2
    assert main(["init", "sums", "--folder", "a b"]) == 0
    assert "next:\n  cd 'a b'\n  tba score examples.jsonl --recipe sums.toml\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["Sums", "1st", "a/b", "..", "with space", "x" * 42, "gsm8k"])
def test_a_name_that_is_no_task_is_refused(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["init", name]) == 2
    assert repr(name) in capsys.readouterr().err
    assert list(place.iterdir()) == []


# ---- `tba score` ----------------------------------------------------------------------------------------------------


EXAMPLE = {"task": "sums", "prompt": "1+1=", "response": "2", "data": {"answer": "2"}}


class FakeService:
    """A reward service that gives every response its number, and cannot score what is none."""

    def __init__(self) -> None:
        self.items: list[ScoreItem] = []

    def score(self, items: list[ScoreItem]) -> ScoreReply:
        self.items += items
        return ScoreReply(results=[self._result(item) for item in items])

    def _result(self, item: ScoreItem) -> ScoreResult:
        try:
            reward = float(item.response)
        except ValueError:
            error = ScoreError(reason="ambiguous", detail="no \x1b[2J number")
            return ScoreResult(item_id=item.item_id, error=error)
        return ScoreResult(item_id=item.item_id, reward=reward, parts={"a": reward, "b": 0.25})


@pytest.fixture
def service(place: Path, monkeypatch: pytest.MonkeyPatch) -> FakeService:
    fake = FakeService()
    monkeypatch.setattr(reward_trial, "ask_scorers", lambda recipe, ask: ask(fake))
    assert main(["init", "sums", "--folder", "."]) == 0
    return fake


def write_examples(*rows: dict[str, Any]) -> list[str]:
    Path("own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ["score", "own.jsonl", "--recipe", "sums.toml"]


def test_a_table_shows_every_example(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    words = write_examples(EXAMPLE, {**EXAMPLE, "response": "0.5", "expected": 0.5})
    assert main(words) == 0
    head, first, second, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["example", "task", "response", "reward", "expected", "parts", "ms", "error"]
    assert first.split()[:5] == ["line", "1", "sums", "'2'", "2"]
    assert second.split()[4:6] == ["0.5", "0.5"]
    assert "a 0.5, b 0.25" in second
    assert last == "2 scored, mismatches: 0, errors: 0"
    # the scorer is a function, which may ask for tokens
    assert [item.response_tokens for item in service.items] == [[50], [48, 46, 53]]


def test_a_mismatch_and_an_error_are_failures(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(write_examples({**EXAMPLE, "expected": 1})) == 1
    assert "mismatch, line 1: expected 1, got 2 for '2'" in capsys.readouterr().out
    assert main(write_examples({**EXAMPLE, "response": "x", "expected": 1})) == 1
    out = capsys.readouterr().out
    assert "ambiguous: no \\x1b[2J number" in out, "text of a scorer must not steer the terminal"
    assert out.splitlines()[-1] == "0 scored, mismatches: 0, errors: 1"
    assert main([*write_examples({**EXAMPLE, "expected": 1}, EXAMPLE), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["num_mismatches"], document["num_errors"]) == (1, 0)
    assert [row["mismatch"] for row in document["examples"]] == [True, False]
    assert document["examples"][0]["result"]["parts"] == {"a": 2.0, "b": 0.25}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"task": "sums", "prompt": "1+1="}, "line 1: response: Field required"),
        ({**EXAMPLE, "expected": "much"}, "line 1: expected: "),
        ({**EXAMPLE, "answer": 2}, "line 1: answer: "),
        ({**EXAMPLE, "finish_reason": "tired"}, "line 1: finish_reason: "),
        (None, "there are no examples in own.jsonl"),
    ],
)
def test_a_line_that_is_no_example_is_named(service: FakeService, capsys, row: dict | None, said: str) -> None:
    assert main(write_examples(*filter(None, [row]))) == 2
    assert said in capsys.readouterr().err
    assert service.items == []


def test_a_reward_of_single_precision_is_the_same_reward() -> None:
    example = Example(task="t", prompt="1+1=", response="r" * 50, expected=0.3333333432674408)
    same = Scored(name="x", example=example, took_s=0.0015, result=ScoreResult(item_id="x", reward=1 / 3))
    assert not same.is_mismatch
    assert same.model_copy(update={"example": example.model_copy(update={"expected": 0.3334})}).is_mismatch
    assert table_lines([same])[1].split()[-1] == "2"


@pytest.mark.parametrize(("num_tasks", "num_workers"), [(0, 1), (1, 1), (3, 3), (8, 4)])
def test_a_trial_has_a_worker_for_each_scorer_but_no_more_than_the_run(monkeypatch, num_tasks, num_workers):
    tasks = {f"task{number}": {"scorers": [{"kind": "exact"}]} for number in range(num_tasks)}
    recipe = make_recipe(reward={"num_workers": 4, "tasks": tasks})
    asked: list[Recipe] = []

    monkeypatch.setattr(reward_trial, "ask_scorers", lambda recipe, _ask: asked.append(recipe) or [])
    reward_trial.try_scorers(recipe, [], http=True)
    assert [recipe.reward.num_workers for recipe in asked] == [num_workers]
