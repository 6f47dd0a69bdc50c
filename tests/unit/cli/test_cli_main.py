"""The command line: errors in a sentence, flags, --help and --json of every command, quick starts."""

from __future__ import annotations

import errno
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tba_searcher.engines.engine import EngineDiedError

from tba.api import RescoreInfo, RescoreRequest
from tba.config import Recipe
from tba.errors import ConfigError, ModelError
from tba.service_main import service_main
from tba.store.file import FileStore, explain_full_disk
from tba_cli.commands import config
from tba_cli.commands.rescore import progress_line, rescore_lines
from tba_cli.main import main
from tba_cli.parser import Command, build_parser, commands_of, parse_arguments
from tests.support.waits import DEADLINE_S

RECIPE = '[run]\nname = "demo"\n[model]\npath = "m"\n[data]\ngenerator = "addition"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "demo.toml"
    path.write_text(RECIPE)
    return path


# ---- `tba` and Ctrl-C during its imports, and a full disk -----------------------------------------------------------


SLOW_IMPORT = """
import sys, time

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            print("ready", flush=True)
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                if name == "tba.logs":  # as weak references do it in an import: it continues
                    time.sleep(600)
                raise

sys.meta_path.insert(0, Slow)
from tba_cli.main import main
sys.exit(main(["config", "schema"]))
"""


@pytest.mark.parametrize("module", ["tba_cli.parser", "tba.logs", "tba_cli.commands.config"])
def test_ctrl_c_while_modules_are_imported_is_one_line(module: str) -> None:
    words, pipe = [sys.executable, "-c", SLOW_IMPORT, module], subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "interrupted\n")


def test_closed_standard_streams_lead_nowhere() -> None:
    code = (
        "import sys; from tba_cli.main import main; code = main(['config', 'schema'])\n"
        "print(code, sys.stdout.isatty(), sys.stdin.fileno(), sys.stdout.fileno(), file=sys.stderr)"
    )
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, code]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    # under their own numbers, which no file of a run may get
    assert (done.returncode, done.stderr) == (0, "0 False 0 1\n")


def test_a_fork_is_resumed_although_the_run_that_it_came_from_is_gone(tmp_path, monkeypatch) -> None:
    resumed: list[tuple[Recipe, dict[str, Any]]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tba_cli.commands.run.run_local", lambda recipe, **how: resumed.append((recipe, how)) or 0)
    folder = tmp_path / "runs" / "forked"
    folder.mkdir(parents=True)
    document = {"run": {"name": "forked"}, "model": {"path": "m"}, "data": {"generator": "addition"}}
    (folder / "recipe.json").write_text(json.dumps(document))
    assert main(["run", "--fork", "gone@1-40", "--run-name", "forked", "--resume"]) == 0
    ((recipe, how),) = resumed
    assert (recipe.run.name, how["resume"], how["folder"].path) == ("forked", True, folder)


def test_a_full_disk_is_named_with_its_folder_and_bytes(tmp_path: Path) -> None:
    plain = OSError(errno.ENOSPC, "No space left on device")  # as write(2) says it: without a file
    said = explain_full_disk(plain, tmp_path / "not" / "there", size_bytes=1234567)
    assert said is not None
    assert said.startswith("the disk of /")
    assert " bytes are free, and 1,234,567 bytes were to be written" in said
    assert str(tmp_path) in said
    assert said.endswith("; free some space")
    named = explain_full_disk(OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "x")), "/")
    assert named is not None
    assert "(quota)" in named
    assert str(tmp_path) in named
    assert explain_full_disk(OSError(errno.EACCES, "Permission denied"), tmp_path) is None


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_store_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "store")
    store.check()
    monkeypatch.setattr("tba.store.file.os.fsync", full)
    said = r"cannot write a/b in file://.*: the disk of /.* is full: .* were to be"
    for write in (lambda: store.put("a/b", b"12345"), lambda: store.put_file("a/b", Path(__file__))):
        with pytest.raises(OSError, match=said) as info:
            write()
        assert "correct store.url" not in str(info.value)


def test_a_command_and_a_service_on_a_full_disk_end_with_a_sentence(recipe: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(config, "schema_command", full)
    monkeypatch.setattr("tba.service_main.configure_logging", lambda *_, **__: None)  # binds stderr
    assert main(["config", "schema"]) == 2
    assert service_main("buffer", full, ["--config", str(recipe)]) == 2
    command, service = capsys.readouterr().err.splitlines()
    assert command.startswith("error: the disk of /")
    assert service.startswith("error: buffer: the disk of /")


# ---- The flags of `tba`: cheap to show, and every error is one sentence ---------------------------------------------


FORBIDDEN = ("torch", "numpy", "pydantic", "transformers", "httpx2", "rich", "matplotlib", "fastapi", "asyncio")


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from tba_cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print('loaded:', sorted(set(sys.modules) & set({FORBIDDEN!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "post-train language models" in done.stdout.lower()
    assert "loaded: []" in done.stdout


@pytest.mark.parametrize("words", [[], ["init"], ["fly"], ["run", "x.toml", "--resume", "--fresh"], ["config"]])
def test_wrong_words_exit_with_2_and_usage(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage: tba" in capsys.readouterr().err


def test_a_missing_recipe_is_one_sentence_on_stderr(capsys):
    assert main(["run", "nowhere.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: recipe nowhere.toml does not exist; `tba run quickstart` runs one that ships with tba\n"


def test_an_image_without_the_launcher_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sentence = "error: this image holds no launcher; run this command where tba is installed\n"
    # some commands import it at once, others only where they need it
    monkeypatch.setattr("importlib.import_module", lambda _: absent("tba_cli.local"))
    assert (main(["run", "recipe.toml"]), capsys.readouterr().err) == (2, sentence)
    monkeypatch.undo()
    monkeypatch.setattr("tba_cli.commands.status.status_command", lambda _: absent("tba_cli.local.ended_run"))
    assert (main(["status"]), capsys.readouterr().err) == (2, sentence)
    monkeypatch.setattr("tba_cli.commands.status.status_command", lambda _: absent("numpy"))
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        main(["status"])


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="does not exist"):
        main(["run", "nowhere.toml", "--debug"])


URL = ["--url", "http://127.0.0.1:1"]
FORK = "is not of the form RUN@LINEAGE-STEP"
NAME = "cannot be used: a name is 1 to 63 of"
SOURCE = "is not of the form RUN/NAME"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *((["run", "--fork", what, "--run-name", "new"], FORK) for what in ("quickstart", "quickstart@1", "q@1-x")),
        (["run", "--fork", "gone@1-40", "--run-name", "new"], "no run 'gone' under runs/; give the recipe of the fork"),
        (["buffer", "save", "end", "gone"], "there is no run 'gone': "),
        *(
            (["buffer", "save", name, *URL], NAME)
            for name in ("", "../x", "a b", "\u00e9", ".hid", "a/b", "a" * 64, "a\n")
        ),
        *((["buffer", "load", source, *URL], SOURCE) for source in ("nonsense", "a/b/c@1-2", "a/b@1-2", "")),
        (["buffer", "load", "demo/end", "--version", "newest", *URL], "'newest' is not of the form LINEAGE-STEP"),
    ],
)
def test_a_name_that_cannot_be_meant_is_one_sentence(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert (error.startswith("error: "), says in error, error.count("\n")) == (True, True, 1), error


# ---- `tba config` on good and bad recipes ---------------------------------------------------------------------------


def test_show_prints_what_the_recipe_and_the_flags_result_in(recipe, capsys):
    assert main(["config", "show", str(recipe), "--set", "trainer.num_steps=7"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trainer"]["num_steps"] == 7
    assert document["run"] == {"name": "demo", "seed": 0, "snapshot": None, "fork_version": None}


# ---- Every command: its --help with examples, and its --json --------------------------------------------------------


COMMANDS = list(commands_of(build_parser()))
WITHOUT_JSON = {
    # their results are files of the run or evaluation, which they name; what they print is progress
    *("run", "demo", "data prepare", "setup", "model pull"),
    # JSON in any case
    *("config show", "config schema"),
    "env try",  # a person plays
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
        *(
            (words, "error: unrecognized arguments: --cost")
            for words in ("run --cost 3 quickstart", "run quickstart --cost 3", "config check --cost=3 none")
        ),
    ],
)
def test_an_option_that_a_command_does_not_take_is_refused_by_its_name(words: str, sentence: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert sentence in capsys.readouterr().err


# ---- The output of `tba rescore` ------------------------------------------------------------------------------------


COUNTS: dict[str, Any] = {"num_total": 50, "num_done": 20, "num_changed": 7, "num_failed": 1, "num_gone": 3}
JOB = RescoreInfo(state="running", task=None, only="all", started_at_s=100.0, start_position=60, **COUNTS)


def test_a_running_job_is_one_line_and_says_what_to_do_and_what_it_waits_for() -> None:
    first, second = rescore_lines(JOB)
    assert first == "23 of 50 rollouts, 7 changed, 1 failed"
    assert "tba rescore --show" in second
    line = progress_line(JOB.model_copy(update={"problem": "http://127.0.0.1:1 does not answer"}))
    assert line.endswith("; waits for the reward service: http://127.0.0.1:1 does not answer")


def test_a_finished_job_compares_before_and_after() -> None:
    done = {"state": "done", "finished_at_s": 102.5, "num_done": 47, "reward_versions": {"addition-2": 46}}
    done |= {"num_known_before": 40, "num_known_after": 46, "mean_reward_before": 0.25, "mean_reward_after": 0.5}
    assert rescore_lines(JOB.model_copy(update=done)) == [
        "done after 2.5 s: 47 of 50 rollouts scored again",
        "                    before       after",
        "  known reward          40          46",
        "  mean reward       0.2500      0.5000",
        "  7 changed, 1 failed, 3 evicted, or scored by others, before they were reached",
        "  reward versions: addition-2 (46)",
    ]
    lines = rescore_lines(JOB.model_copy(update={"state": "cancelled", "finished_at_s": 100.0}))
    assert "unknown" in lines[3], "nothing scored has no mean"
    assert lines[-1] == "  reward versions: none"


def test_the_flags_start_a_job_or_show_the_last_one(monkeypatch, capsys):
    asked: list[RescoreRequest] = []
    start = lambda request: asked.append(request) or JOB  # noqa: E731
    client = SimpleNamespace(rescore=lambda: JOB, start_rescore=start, close=lambda: None)
    monkeypatch.setattr("tba_cli.commands.rescore.open_client", lambda _: client)
    assert main(["rescore", "--task", "t", "--only", "failed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_changed"] == 7
    assert main(["rescore", "--show"]) == 0
    assert asked == [RescoreRequest(task="t", only="failed")]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelError("not decoded"), 4), (ConfigError("GPU memory is held"), 2), (EngineDiedError("out of memory"), 2)],
)
def test_a_searcher_gives_up_for_good_only_for_what_stays_wrong(recipe, monkeypatch, error, code):
    def fails(_: object) -> int:
        raise error

    monkeypatch.setattr("tba.service_main.configure_logging", lambda *_, **__: None)  # binds stderr
    assert service_main("searcher", fails, ["--config", str(recipe)]) == code
