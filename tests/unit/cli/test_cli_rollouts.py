"""`tba rollouts list|export` and `tba view` of a run in progress: flags, output, files."""

from __future__ import annotations

import html
import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from tba.api import EVICTED_KEY, RolloutDetail, RolloutInfo, RolloutPage, RunInfo, RunSummary
from tba.clients import BufferClient
from tba.errors import NotFoundError
from tba_cli.commands import rollouts, view
from tba_cli.main import main
from tests.support.history_values import RUN_INFO

DETAIL: dict[str, Any] = {
    "version_spans": [{"version": "1-40", "start": 0, "end": 2}, {"version": "1-41", "start": 2, "end": 3}],
    "reward_parts": [{"name": "exact", "score": 1.0, "weight": 0.7}, {"name": "brief", "score": 0.1, "weight": None}],
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None, "stop": []},
    "ref_logprob": {"value": -2.5, "version": "0-0"},
    "trained": [
        {"version": "1-42", "at_s": 3.0, "advantage": -0.25, "weight": 1.0, "skipped": None, "abandoned": False},
        {"version": "1-43", "at_s": 4.0, "advantage": 0.5, "weight": None, "skipped": "spike", "abandoned": True},
    ],
}
DETAIL |= {"rollout_id": "0" * 32, "task": "addition", "prompt_id": "p-1", "visit_id": "v", "searcher_id": "searcher-0"}
DETAIL |= {"version": "1-40", "trained_since": "1-10", "policy_age_steps": 3, "num_batches": 2, "started_at_s": 1.0}
DETAIL |= {"prompt_text": "1+1=", "num_prompt_tokens": 4, "prompt_tokens": [1, 2, 3, 4], "prompt_data": {"answer": 2}}
DETAIL |= {"response_text": "2\n\x1b[2J", "response_text_cut": False, "finish_reason": "stop", "finished_at_s": 2.5}
DETAIL |= {"num_response_tokens": 3, "response_tokens": [7, 8, 9], "sampler_logprobs": [-0.5, -1.25, -0.125]}
DETAIL |= {"token_texts": ["2", "\n", "\x1b"], "reward": 0.75, "reward_status": "scored", "reward_reason": None}
DETAIL |= {"reward_version": "addition-1", "episode": None}


def info_of(number: int, **changes: Any) -> RolloutInfo:
    document = {**{name: DETAIL[name] for name in RolloutInfo.model_fields}, "rollout_id": f"{number:032x}", **changes}
    return RolloutInfo.model_validate(document)


class FakeRun:
    """A client whose rollouts a test adds; `filters` are those of the last request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: list[RolloutInfo] = []
        self.details: dict[str, RolloutDetail] = {}
        self.filters: dict[str, Any] = {}
        self.max_per_page = 100
        self.on_run: Callable[[], None] = lambda: None
        monkeypatch.setattr(rollouts, "ended_run", lambda _: None)
        monkeypatch.setattr(rollouts, "open_client", lambda _: cast(BufferClient, self))

    def list_rollouts(self, *, order: str = "newest", limit: int, cursor: str | None, text_chars: int, **filters: Any):
        self.filters = {name: value for name, value in filters.items() if value is not None}
        found = self.stored if order == "oldest" else self.stored[::-1]
        first = int(cursor or 0)
        last = min(first + min(limit, self.max_per_page), len(found))
        following = str(last) if last < len(found) else None
        return RolloutPage(rollouts=found[first:last], next=following, num_read=last - first)

    def summary(self) -> RunSummary:
        return RunSummary(state="flat", doing="It runs.", learning=None, finding="It is.", remedy=None)

    def get_rollout(self, rollout_id: str) -> RolloutDetail:
        if rollout_id not in self.details:
            raise NotFoundError("it was evicted")
        return self.details[rollout_id]

    def export_rollouts(self, path: Path, **filters: Any) -> int:
        self.filters = {name: value for name, value in filters.items() if value is not None}
        from pyarrow import Table, parquet

        table = Table.from_pylist([{"a": 1}, {"a": 2}]).replace_schema_metadata({EVICTED_KEY: "3"})
        parquet.write_table(table, path)
        return path.stat().st_size

    def run(self) -> RunInfo:
        self.on_run()
        return RunInfo.model_validate({**RUN_INFO, "state": "done"})

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    return FakeRun(monkeypatch)


FILTER_WORDS = (
    "--prompt-id p --task t --version 1-2 --from-version 1-1 --to-version 1-3 --status scored --min-reward 0.5 "
    "--max-reward 1 --searcher searcher-0 --finish-reason length --contains Hello --environment shop "
    "--stop-condition max_turns --failure-boundary tool"
)


def test_every_filter_reaches_the_service(run: FakeRun, tmp_path: Path) -> None:
    wanted = {"prompt_id": "p", "task": "t", "version": "1-2", "from_version": "1-1", "to_version": "1-3"}
    wanted |= {"status": "scored", "min_reward": 0.5, "max_reward": 1.0, "searcher_id": "searcher-0"}
    wanted |= {"finish_reason": "length", "contains": "Hello"}
    wanted |= {"environment": "shop", "stop_condition": "max_turns", "failure_boundary": "tool"}
    for words in (["list"], ["export", "--out", str(tmp_path / "a.parquet")]):
        run.filters = {}
        assert main(["rollouts", *words, *FILTER_WORDS.split()]) == 0
        assert run.filters == wanted, words


def test_a_list_continues_over_pages_that_hold_fewer(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A filter that reads payloads answers with short pages, even empty ones."""
    run.stored, run.max_per_page = [info_of(number) for number in range(8)], 2
    assert main(["rollouts", "list", "--limit", "5"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line[:32] for line in out[:-1:4]] == [f"{number:032x}" for number in (7, 6, 5, 4, 3)]
    assert out[-1] == "there are more: raise --limit"
    assert out[2] == "  gold data: {'answer': 2}"
    assert out[3] == r"  completion: '2\n\x1b[2J'"
    assert main(["rollouts", "list", "--limit", "50", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert (len(page["rollouts"]), page["next"], page["num_read"]) == (8, None, 8)
    run.stored = []
    assert main(["rollouts", "list"]) == 0
    assert capsys.readouterr().out == "no stored rollout matches\n"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"prompt_data": {"answer": "\x1b[2J"}}, r"  gold data: {'answer': '\x1b[2J'}"),
        ({"prompt_data": None}, "  gold data: not in the list; see `tba rollouts list --id`"),
        ({"prompt_data": None, "prompt_text": None}, None),
        ({"prompt_data": {}}, None),
    ],
)
def test_a_list_shows_the_gold_data_where_there_is_some(changes: dict[str, Any], line: str | None) -> None:
    lines = rollouts.lines_of(info_of(0, **changes))
    assert lines[2:-1] == ([] if line is None else [line])


@pytest.mark.parametrize(("is_truncated", "how"), [(True, "cut off by max_turns"), (False, "ended by max_turns")])
def test_a_list_says_which_episode_a_conversation_is(is_truncated: bool, how: str) -> None:
    episode = {"episode_id": "e", "environment": "game", "environment_version": "1", "seed": 5, "seat": 0}
    episode |= {"stop_condition": "max_turns", "turn_rewards": [None, 1.0], "num_turns": 2, "num_tool_calls": 1}
    lines = rollouts.lines_of(info_of(0, episode={**episode, "is_truncated": is_truncated}))
    assert lines[-2] == f"  episode of game: 2 turns, 1 tool calls, {how}"


def test_json_that_is_printed_has_nothing_that_a_terminal_obeys(run: FakeRun, capsys) -> None:
    text = "\x9b2J\x85\u2028\u202e"
    run.stored = [info_of(0, response_text=text)]
    run.details = {"0" * 32: RolloutDetail.model_validate({**DETAIL, "response_text": text})}
    for words in (["rollouts", "list", "--id", "0" * 32], ["rollouts", "list", "--json"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert (out.isascii(), r"\u009b2J\u0085\u2028\u202e" in out) == (True, True), words


@pytest.mark.parametrize("name", ["0" * 8, "0" * 31 + "g", "0" * 33, "A" * 32])
def test_a_part_of_an_id_is_refused_with_a_remedy(name: str, run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "list", "--id", name]) == 2
    assert f"'{name}' is no rollout id: give all 32 hexadecimal digits" in capsys.readouterr().err


def test_an_export_replaces_a_file_only_with_force(run: FakeRun, tmp_path, capsys) -> None:
    out = tmp_path / "r.parquet"
    out.write_text("mine")
    assert main(["rollouts", "export", "--out", str(out)]) == 2
    assert "--force to replace it" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["rollouts", "export", "--out", str(out), "--force"]) == 0
    said = f"wrote 2 rollouts (3 more were evicted before they were read) to {out}, {out.stat().st_size:,} bytes\n"
    assert capsys.readouterr().out == said
    assert main(["rollouts", "export", "--out", str(out), "--force", "--json"]) == 0
    document = {"out": str(out), "num_rollouts": 2, "num_evicted": 3, "num_bytes": out.stat().st_size}
    assert json.loads(capsys.readouterr().out) == document


def test_an_export_names_its_format_and_missing_folders(run: FakeRun, tmp_path, capsys) -> None:
    assert main(["rollouts", "export", "--out", "r.jsonl"]) == 2
    assert "--out r.jsonl must end with .parquet" in capsys.readouterr().err
    assert main(["rollouts", "export", "--out", str(tmp_path / "no" / "r.parquet")]) == 2
    assert "does not exist; make it first" in capsys.readouterr().err


# ---- `tba view` of runs in progress ---------------------------------------------------------------------------------


@pytest.fixture
def opened(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the browser was told to show, by the file that the address of the page was in."""
    found: list[str] = []

    def open_page(url: str) -> None:
        assert "token" not in url, "other users see the arguments of a browser"
        path = Path(url2pathname(urlsplit(url).path))
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        (shown,) = re.findall('content="0; url=([^"]*)"', path.read_text())
        found.append(html.unescape(shown))
        files.append(path)

    files: list[Path] = []
    monkeypatch.setattr(view, "ended_run", lambda _: None)
    monkeypatch.setattr(view, "open_target", lambda args: (run, f"http://127.0.0.1:1/#token={args.run}"))
    monkeypatch.setattr(view, "endpoints_of", lambda folder: ("", f"{folder.path.name}.json", None))
    monkeypatch.setattr(view.webbrowser, "open", open_page)
    monkeypatch.setattr(view.time, "sleep", lambda _: None)
    monkeypatch.setenv("DISPLAY", ":0")
    yield found
    assert [path for path in files if path.parent.exists()] == [], "nothing is left behind"


def test_the_page_of_a_run_in_progress_is_printed_and_opened(opened: list[str], capsys) -> None:
    url = "http://127.0.0.1:1/#token=a"
    assert main(["view", "a"]) == 0
    out, err = capsys.readouterr()
    assert (out, opened) == ("http://127.0.0.1:1/\n", [url])
    assert "it asks for a token: that of the operator in a.json; --json prints it too" in err
    assert "token=" not in err, "a terminal keeps what it has shown"
    assert main(["view", "a", "--json", "--no-open"]) == 0
    assert (json.loads(capsys.readouterr().out), opened) == ({"url": url}, [url])


def test_without_a_display_no_text_browser_takes_the_terminal(opened: list[str], monkeypatch, capsys) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert main(["view", "a"]) == 0
    assert (capsys.readouterr().out, opened) == ("http://127.0.0.1:1/\n", [])


def test_a_page_that_cannot_be_asked_is_a_sentence(opened: list[str], run: FakeRun, capsys) -> None:
    def refuse() -> None:
        raise NotFoundError("no such run here")

    run.on_run = refuse
    assert main(["view", "a"]) == 2
    assert (capsys.readouterr().err, opened) == ("error: no such run here\n", [])


def test_the_token_is_behind_the_hash_where_a_browser_sends_it_to_nobody(tmp_path: Path) -> None:
    from tba_cli.run_target import open_target

    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"viewer": "viewer-token-16-letters", "operator": "operator+token/16"}))
    target = Namespace(url="https://buffer:8700/", run=None, run_dir=None, token_file=str(tokens), ca_file=None)
    client, url = open_target(target)
    client.close()
    assert url == "https://buffer:8700/#token=operator%2Btoken%2F16"
    target.token_file = None
    client, url = open_target(target)
    client.close()
    assert url == "https://buffer:8700/"
