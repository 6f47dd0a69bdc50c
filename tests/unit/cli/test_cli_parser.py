"""Every command: its --help with examples, its --json, and the completion of shells."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tba_cli.main import main
from tba_cli.parser import build_parser
from tba_cli.parser_help import EXAMPLES, Command, commands_of

COMMANDS = list(commands_of(build_parser()))
WITHOUT_JSON = {
    # their results are files of the run or evaluation, which they name; what they print is progress
    "run",
    "demo",
    "fork",
    "data prepare",
    "sft",
    "train-reward",
    "setup",
    "model push",
    "model pull",
    "buffer seed",
    # JSON in any case
    "config show",
    "config schema",
    # for people, and for shells
    "top",
    "completion",
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words or "tba")
def test_a_help_says_what_the_command_does_and_ends_with_examples_that_the_parser_takes(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.words.split()
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    shown, _, examples = capsys.readouterr().out.partition("examples:\n")
    assert command.help
    assert " ".join(command.help.split()) in " ".join(shown.split())
    lines = [line.strip() for line in examples.splitlines()]
    assert lines == EXAMPLES[command.words].splitlines()
    assert 1 <= len(lines) <= 3
    for line in lines:
        shell = line.partition(" | ")[0].partition(" > ")[0]
        example = shlex.split(shell, comments=True)
        assert example[: len(words) + 1] == ["tba", *words]
        build_parser().parse_args(example[1:])


def test_no_examples_are_left_of_a_command_that_is_gone() -> None:
    assert set(EXAMPLES) == {command.words for command in COMMANDS}


def test_every_command_that_prints_a_result_prints_json() -> None:
    without = {
        command.words for command in COMMANDS if not command.is_group and "--json" not in command.parser.format_help()
    }
    assert without == WITHOUT_JSON


# ---- Completion -----------------------------------------------------------------------------------------------------


COMPLETE = """
. ./tba.bash
COMP_WORDS=(tba {words} "{last}")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMPREPLY=()
$(complete -p tba | sed 's/.*-F \\([^ ]*\\).*/\\1/')
echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, a recipe, and the script of bash."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("seed0", "seed1", "other"):
        (folder / "runs" / name).mkdir(parents=True)
    (folder / "recipe.toml").touch()
    return folder


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "last", "found"),
    [
        ("", "roll", ["rollback", "rollouts"]),
        ("rollouts", "", ["list", "show", "export"]),
        ("rollouts list --order", "b", ["best"]),
        ("rollouts list", "--finish", ["--finish-reason"]),
        ("view", "seed", ["seed0", "seed1"]),
        ("score --from-run", "o", ["other"]),
        ("run", "rec", ["recipe.toml"]),
    ],
)
def test_bash_completes(
    place: Path, capsys: pytest.CaptureFixture[str], words: str, last: str, found: list[str]
) -> None:
    (place / "tba.bash").write_text(script_of("bash", capsys))
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE.format(words=words, last=last)],
        cwd=place,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.split(), done.stderr) == (found, "")


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_other_shells_can_read_their_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shell: str, check: str
) -> None:
    script = script_of(shell, capsys)
    assert "_tba_runs" in script
    assert "rollouts" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, check, str(tmp_path / "script")], check=True)
