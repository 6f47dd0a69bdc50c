"""The flags of `tba`: cheap to show, and every error is one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tba_cli.main import main

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


@pytest.mark.parametrize("words", [[], ["run"], ["fly"], ["run", "x.toml", "--resume", "--fresh"], ["config"]])
def test_wrong_words_exit_with_2_and_usage(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage: tba" in capsys.readouterr().err


def test_a_missing_recipe_is_one_sentence_on_stderr(capsys):
    assert main(["run", "nowhere.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: recipe nowhere.toml does not exist; recipes that ship with tba are in recipes/\n"


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="does not exist"):
        main(["run", "nowhere.toml", "--debug"])


def test_ctrl_c_exits_with_130(monkeypatch, capsys):
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tba_cli.commands.config.schema_command", interrupted)
    assert main(["config", "schema"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("what", ["quickstart", "quickstart@", "quickstart@1", "quickstart@1-x"])
def test_a_fork_needs_a_run_and_a_version(what, capsys):
    assert main(["fork", what, "new"]) == 2
    assert "is not of the form RUN@LINEAGE-STEP" in capsys.readouterr().err


def test_a_fork_of_a_run_that_is_not_here_needs_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fork", "gone@1-40", "new"]) == 2
    assert "there is no run 'gone' under runs/; give the recipe of the fork as well" in capsys.readouterr().err


def test_the_buffer_of_a_run_that_never_was_cannot_be_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["buffer", "save", "end", "gone"]) == 2
    assert "there is no run 'gone': " in capsys.readouterr().err
