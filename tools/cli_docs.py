"""The reference of the command line, from its parser: tools/docs_site.py writes it into the documentation's site."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tba_cli.main import EXIT_ERROR, EXIT_FAILED, EXIT_INTERRUPTED
from tba_cli.parser import GROUPS, Command, build_parser, commands_of, global_options

HEAD = f"""\
# Command line

Every command of `tba`, with its flags and examples, as `tba COMMAND --help` prints them.

Exit codes: 0 done; {EXIT_FAILED} the run failed, or a check found something; {EXIT_ERROR} an error that is explained;
{EXIT_INTERRUPTED} Ctrl-C. Every command has `--help`.

Options of `tba` itself stand before a command or behind it. Each command names those that it takes; all take `--debug`.
"""
COMMON = frozenset({"-h"})
"""Flags that `HEAD` describes for all commands."""


def page() -> str:
    """Return the reference as a Markdown page."""
    commands = list(commands_of(build_parser()))
    rows = ""
    for heading, names in GROUPS.items():
        of_group = [it for it in commands if it.words.split()[0] in names.split()]
        rows += f"| **{heading}** | |\n"
        rows += "".join(f"| [`tba {it.words}`](#{_anchor(it)}) | {_cell(it.help)} |\n" for it in of_group)
    options = [f"| `{_cell(_name(it))}` | {_cell(it.help or '')} |" for it in global_options()._actions]
    return "\n".join(
        [HEAD, "| option | |", "|---|---|", *options, "", f"| command | |\n|---|---|\n{rows}", *map(_section, commands)]
    )


def _section(command: Command) -> str:
    """Return the section of the page about one command."""
    lines = [f"## tba {command.words}", "", _sentence(command.help), "", f"    {_usage(command)}", ""]
    rows = [f"| `{_cell(_name(action))}` | {_cell(text)} |" for action, text in _flags(command)]
    if rows:
        lines += ["| argument or flag | |", "|---|---|", *rows, ""]
    if command.takes:
        lines += [f"Options of `tba` that it takes: {', '.join(f'`{flag}`' for flag in command.takes)}.", ""]
    return "\n".join([*lines, "```bash", *command.examples, "```", ""])


def _usage(command: Command) -> str:
    """Return a command's usage line; argparse's own differs between releases of Python."""
    actions = [action for action, _ in _flags(command)]
    words = [_name(action) for action in actions if action.option_strings and action.required]
    for action in actions:
        if action.option_strings:
            continue
        value = _value(action) + (" ..." if action.nargs in ("*", "+") else "")
        words.append(f"[{value}]" if action.nargs in ("?", "*") else value)
    has_flags = any(action.option_strings and not action.required for action in actions)
    return " ".join(["tba", command.words, *words, *(["[flags]"] if has_flags else [])])


def _flags(command: Command) -> Iterator[tuple[argparse.Action, str]]:
    """Yield the arguments and flags of a command, each with its description."""
    for action in command.parser._actions:
        if COMMON & set(action.option_strings):
            continue
        notes = [action.help or ""]
        for group in command.parser._mutually_exclusive_groups:
            if action in group._group_actions:
                others = [f"`{_name(other)}`" for other in group._group_actions if other is not action]
                notes.append(f"not with {' or '.join(others)}")
        yield action, "; ".join(notes)


def _name(action: argparse.Action) -> str:
    return f"{', '.join(action.option_strings)} {_value(action)}".strip()


def _value(action: argparse.Action) -> str:
    """Return the placeholder of a flag's value, or the name of an argument."""
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


def _anchor(command: Command) -> str:
    return f"tba {command.words}".replace(" ", "-")
