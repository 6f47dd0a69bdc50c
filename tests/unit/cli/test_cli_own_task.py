"""`tba init`, and what `tba score` reads and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tba.api import RolloutDetail, RolloutPage, ScoreError, ScoreItem, ScoreReply, ScoreResult
from tba.config import load_recipe
from tba.errors import NotFoundError
from tba_cli.commands import score
from tba_cli.commands.score import Scored, mismatch_line, table_lines
from tba_cli.local import reward_trial
from tba_cli.main import main
from tba_cli.prompts.reader import prompts_of
from tba_cli.task_files import NUM_HELDOUT, NUM_TRAIN
from tests.unit.cli.test_cli_rollouts import DETAIL

# ---- `tba init` -----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_task_has_prompts_of_both_splits_for_the_task_of_its_recipe(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "sums", "--folder", "new/place", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    files = sorted(str(path.relative_to(place)) for path in (place / "new" / "place").iterdir())
    assert sorted(document["files"]) == files
    assert len(document["next"]) == 3
    monkeypatch.chdir(place / "new" / "place")
    recipe = load_recipe("sums.toml")
    prompts = prompts_of(recipe)
    assert (len(prompts), sum(prompt.split == "heldout" for prompt in prompts)) == (
        NUM_TRAIN + NUM_HELDOUT,
        NUM_HELDOUT,
    )
    assert {prompt.task for prompt in prompts} == set(recipe.reward.tasks) == {"sums"}
    assert all(len(prompt.text) <= recipe.searcher.max_prompt_tokens for prompt in prompts)
    assert recipe.eval.best_metric == "mean_reward"
    known = set("0123456789+=")
    assert all(set(prompt.text) <= known for prompt in prompts)


def test_what_is_printed_are_the_next_commands(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "sums"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(
        "next:\n  cd sums\n  tba score examples.jsonl --recipe sums.toml\n  tba config check sums.toml\n"
        "  tba run sums.toml\n"
    )


def test_nothing_is_overwritten(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "sums").mkdir()
    (place / "sums" / "notes").write_text("mine")
    assert main(["init", "sums"]) == 2
    assert "sums exists already, and nothing in it is overwritten" in capsys.readouterr().err
    assert [path.name for path in (place / "sums").iterdir()] == ["notes"]
    (place / "file").touch()
    assert main(["init", "sums", "--folder", "file"]) == 2


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
    assert last == "2 scored, 0 mismatches, 0 errors"
    # the scorer is a function, which may ask for tokens
    assert [item.response_tokens for item in service.items] == [[50], [48, 46, 53]]


def test_a_mismatch_and_an_error_are_failures(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(write_examples({**EXAMPLE, "expected": 1})) == 1
    assert "mismatch, line 1: expected 1, got 2 for '2'" in capsys.readouterr().out
    assert main(write_examples({**EXAMPLE, "response": "x", "expected": 1})) == 1
    out = capsys.readouterr().out
    assert "ambiguous: no \\x1b[2J number" in out, "text of a scorer must not steer the terminal"
    assert out.splitlines()[-1] == "0 scored, 1 error"
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
    ],
)
def test_a_line_that_is_no_example_is_named(
    service: FakeService, capsys: pytest.CaptureFixture[str], row: dict[str, Any], said: str
) -> None:
    assert main(write_examples(row)) == 2
    assert said in capsys.readouterr().err
    assert service.items == []


def test_what_is_missing_is_said(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "--recipe", "sums.toml"]) == 2
    assert "name a FILE with examples, or a run" in capsys.readouterr().err
    assert main(["score", "examples.jsonl"]) == 2
    assert "--recipe RECIPE" in capsys.readouterr().err
    assert main(["score", "--from-run", "gone"]) == 2
    assert "there is no run 'gone'" in capsys.readouterr().err
    Path("own.jsonl").touch()
    assert main(["score", "own.jsonl", "--recipe", "sums.toml"]) == 2
    assert "own.jsonl" in capsys.readouterr().err


class FakeRun:
    """A run with three rollouts; the second one is evicted before it is read, the third has no score."""

    def list_rollouts(self, *, limit: int, text_chars: int) -> RolloutPage:
        rollouts = [RolloutDetail.model_validate({**DETAIL, "rollout_id": str(n) * 32}) for n in range(3)]
        return RolloutPage(rollouts=rollouts[:limit], next=None)  # pyright: ignore[reportArgumentType]

    def get_rollout(self, rollout_id: str) -> RolloutDetail:
        if rollout_id.startswith("1"):
            raise NotFoundError("evicted")
        changes = {"task": "sums", "response_text": "0.75", "rollout_id": rollout_id, "finish_reason": "length"}
        if rollout_id.startswith("2"):
            changes |= {"reward": None, "reward_status": "pending", "response_text": "3"}
        return RolloutDetail.model_validate({**DETAIL, **changes})


def test_stored_rollouts_are_scored_again_and_compared(
    service: FakeService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "with_run", lambda args, use: use(FakeRun()))
    capsys.readouterr()
    words = ["score", "--from-run", "any", "--recipe", "sums.toml"]
    assert main(words) == 0
    head, row, _, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["example", "task", "response", "gold", "data", "reward", "stored", "parts", "ms", "error"]
    assert row.split()[2:7] == ["'0.75'", "{'answer':", "2}", "0.75", "0.75"]
    assert last == "2 scored, 0 mismatches, 0 errors"
    first, second = service.items
    assert (first.item_id, first.finish_reason, first.response_tokens) == ("0" * 32, "length", [7, 8, 9])
    assert (first.prompt, first.data) == ("1+1=", {"answer": 2})
    assert second.response == "3"
    monkeypatch.setattr(service, "_result", lambda item: ScoreResult(item_id=item.item_id, reward=0.5))
    assert main(words) == 1
    assert f"mismatch, {'0' * 32}: stored 0.75, got 0.5 for '0.75'" in capsys.readouterr().out
    assert main([*words, "--num", "0"]) == 2
    assert "--num 0 is out of range" in capsys.readouterr().err


def test_a_stored_reward_of_single_precision_is_the_same_reward() -> None:
    result = ScoreResult(item_id="x", reward=1 / 3)
    same = Scored(
        name="x", task="t", response="r" * 50, data={}, expected=0.3333333432674408, took_s=0.0015, result=result
    )
    assert not same.is_mismatch
    other = same.model_copy(update={"expected": 0.3334})
    assert other.is_mismatch
    assert (
        mismatch_line(other, of_run=False) == "mismatch, x: expected 0.3334, got 0.333333 for 'rrrrrrrrrrrrrrrrrrr ..."
    )
    assert table_lines([same], of_run=False)[1].split()[-1] == "2"
