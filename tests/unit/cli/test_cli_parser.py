"""Every command: its --help with examples, and its --json."""

from __future__ import annotations

import shlex

import pytest

from tba_cli.main import main
from tba_cli.parser import Command, build_parser, commands_of, parse_arguments

COMMANDS = list(commands_of(build_parser()))
WITHOUT_JSON = {
    # their results are files of the run or evaluation, which they name; what they print is progress
    *("run", "demo", "data prepare", "setup", "model pull"),
    # JSON in any case
    *("config show", "config schema"),
}


@pytest.mark.parametrize("command", [Command("", "", build_parser()), *COMMANDS], ids=lambda command: command.words)
def test_a_help_says_what_the_command_does_and_ends_with_examples_that_the_parser_takes(command, capsys):
    words = command.words.split()
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    shown, _, examples = capsys.readouterr().out.partition("examples:\n")
    assert " ".join(command.help.split()) in " ".join(shown.split())
    lines = [line.strip() for line in examples.splitlines()]
    assert lines == command.examples
    assert 1 <= len(lines) <= 3
    for line in lines:
        example = shlex.split(line.partition(" > ")[0], comments=True)
        assert example[: len(words) + 1] == ["tba", *words]
        parse_arguments(example[1:])


def test_every_command_that_prints_a_result_prints_json() -> None:
    assert all(command.help for command in COMMANDS)
    assert {command.words for command in COMMANDS if "--json" not in command.takes} == WITHOUT_JSON


@pytest.mark.parametrize("words", ["--json --url http://b status", "status --url http://b --json"])
def test_the_options_of_tba_stand_before_a_command_or_behind_it(words: str) -> None:
    args = parse_arguments(words.split())
    assert (args.url, args.json, args.run, args.token_file, args.debug) == ("http://b", True, None, None, False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("demo --url http://b", "this command does not take --url"),
        ("--json run quickstart", "this command does not take --json"),
        ("status --url http://b --run-dir r", "argument --run-dir: not allowed with argument --url"),
        ("view --run-dir r one", "argument RUN: not allowed with argument --run-dir"),
    ],
)
def test_an_option_that_a_command_has_no_use_for_is_refused(words: str, sentence: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("words", ["run --cost 3 quickstart", "run quickstart --cost 3", "config check --cost=3 none"])
def test_an_unknown_flag_is_refused_by_its_name(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert "error: unrecognized arguments: --cost" in capsys.readouterr().err
