"""Which run a command talks to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tba.errors import ConfigError
from tba.tokens import operator_token
from tba_cli.main import main
from tba_cli.parser import build_parser
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import open_client


def url_of(*words: str) -> str:
    client = open_client(build_parser().parse_args(["status", *words]))
    client.close()
    return client.base_url


def write_endpoints(folder: Path, port: int, *, at_s: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "endpoints.json"
    path.write_text(json.dumps({"buffer_url": f"http://127.0.0.1:{port}", "tokens_file": None}))
    os.utime(path, (at_s, at_s))


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two runs that are going; a third was killed, later than they began."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as going:
        for name in ("older", "newer"):
            going.enter_context(RunFolder(tmp_path / "runs" / name).acquire(resume=False, fresh=True))
        write_endpoints(tmp_path / "runs" / "older", 1111, at_s=1000)
        write_endpoints(tmp_path / "runs" / "newer", 2222, at_s=2000)
        write_endpoints(tmp_path / "runs" / "killed", 3333, at_s=3000)
        yield tmp_path


def test_the_newest_run_is_the_default(two_runs):
    assert url_of() == "http://127.0.0.1:2222"


def test_a_run_is_found_by_name_by_folder_or_by_url(two_runs):
    assert url_of("older") == "http://127.0.0.1:1111"
    assert url_of("--run-dir", str(two_runs / "runs" / "older")) == "http://127.0.0.1:1111"
    assert url_of("--url", "http://buffer:8700/") == "http://buffer:8700"


def test_no_run_at_all_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run is going under runs/"):
        url_of()


def test_a_run_that_was_killed_is_a_clear_error_though_it_left_its_addresses(two_runs):
    with pytest.raises(ConfigError, match="run 'killed' is not going"):
        url_of("killed")


def test_a_run_that_has_no_addresses_yet_is_a_clear_error(two_runs):
    (two_runs / "runs" / "older" / "endpoints.json").unlink()
    with pytest.raises(ConfigError, match="run 'older' is starting or ending"):
        url_of("older")


@pytest.mark.parametrize("command", [["status"], ["ledger", "check"], ["rollouts"], ["buffer", "accept-loss"]])
def test_a_run_that_never_began_is_a_sentence_with_the_runs_that_did(
    two_runs: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(["older", "newer"]):
        marker = two_runs / "runs" / name / ".tba-run"
        marker.touch()
        os.utime(marker, (number, number))
    assert main([*command, "oldr"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: there is no run 'oldr': ")
    assert said.endswith(
        "the runs beside it are: newer, older; name one of them, give --run-dir DIR or --url URL, or start one with "
        "`tba run RECIPE`"
    )


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("word-of-16-letters\n", "word-of-16-letters"),
        ('{"viewer": "vvv", "operator": "ooo"}', "ooo"),
        ('{"viewer": "vvv"}', "vvv"),
    ],
)
def test_a_token_file_holds_one_word_or_tokens_by_role(tmp_path, text, token):
    path = tmp_path / "token"
    path.write_text(text)
    assert operator_token(path) == token


@pytest.mark.parametrize("text", ["", "two words", '{"searcher": "s"}', "{broken"])
def test_a_token_file_without_a_usable_token_is_refused(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigError, match="token file"):
        operator_token(path)
