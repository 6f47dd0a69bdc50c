"""Names of snapshots on the command line: refused in a sentence, before anything is asked or started."""

from __future__ import annotations

import pytest

from tba_cli.main import main

URL = ["--url", "http://127.0.0.1:1"]


@pytest.mark.parametrize("name", ["", "../x", "a b", "\u00e9", ".hid", "a/b", "a" * 64, "a\n"])
def test_a_name_that_cannot_be_one_is_an_explained_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "save", name, *URL]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: snapshot name {name!r} cannot be used: a name is 1 to 63 of")
    assert error.count("\n") == 1


@pytest.mark.parametrize("source", ["nonsense", "a/b/c@1-2", "a/b@1-2", ""])
def test_a_source_that_cannot_be_one_is_an_explained_error(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "load", source, *URL]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: snapshot {source!r} is not of the form RUN/NAME")
    assert error.count("\n") == 1


def test_a_version_that_cannot_be_one_is_an_explained_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "load", "demo/end", "--version", "newest", *URL]) == 2
    assert "'newest' is not of the form LINEAGE-STEP" in capsys.readouterr().err
