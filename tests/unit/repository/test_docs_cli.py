"""The reference of the command line has every command, from the parser."""

from __future__ import annotations

from tools import cli_docs


def test_every_command_has_its_part_of_the_page() -> None:
    page = cli_docs.page()
    assert page.count("\n## tba ") == page.count("| [`tba ") > 10
    for flag in ("`N\\|recipe` | how many", "`--json` | print JSON"):
        assert flag in page
