"""Errors in the words of Python: commands and shared functions name flags of `tba`, which a script does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tba.errors import TbaError

_VALUE = r"[A-Z][A-Z/-]+\b|[\w.:@%+/=-]*(?:\d|[./:=][\w/])[\w.:@%+/=-]*(?<=[\w/])"
"""A placeholder, or a word that is no plain one: `DIR`, `3-4`, `runs/x`. What follows a flag may also be prose."""
_REPLACED = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        # before the single flags
        (
            r"take the changes with --take-changes, or continue as it began with: \S.* run (\S+) --resume",
            r'continue as it began with tba.run("\1", resume=True), and give changes as sets=[...]',
        ),
        (r"give --run-dir DIR or --url URL", "give the path of its folder or url=..."),
        (r"--set ([\w.]+=[\w./-]+)(?=[\s,;]|$)", r'sets=["\1"]'),
        (r"--set(?![\w-])", "sets"),
        (r"--(resume|fresh|public)(?![\w-])", r"\1=True"),
        (rf"--run-name (?P<value>{_VALUE})", r'name="\g<value>"'),
        (rf"--push-to-hub (?P<value>{_VALUE})", r'push_to_hub="\g<value>"'),
        (rf"--(url|version|out|recipe|snapshot) (?P<value>{_VALUE})", r'\1="\g<value>"'),
        (r"--run-name(?![\w-])", "name=..."),
        (r"--push-to-hub(?![\w-])", "push_to_hub"),
        (r"--(url|version|snapshot)(?![\w-])", r"\1=..."),
        (r"--(out|recipe)(?![\w-])", r"\1"),
    )
)
"""What a message says to a shell -> what it says to a script; the first ones first."""
_COMMAND = re.compile(r"(`[^`]*`)")
_BEGIN = {"`tba run RECIPE`": "`tba.run(recipe)`"}
"""A command -> its call. Others stay as they are: a script can be told to use a shell."""


def in_python(text: str) -> str:
    """Return a message with the arguments of `tba.run` and `tba.Run` in place of flags."""
    return "".join(_BEGIN.get(part, part) if part[:1] == "`" else _flags(part) for part in _COMMAND.split(text))


def _flags(text: str) -> str:
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text


@contextmanager
def python_words() -> Iterator[None]:
    """Let every error of tba that leaves the block speak of arguments.

    Raises:
        TbaError: as raised inside, of the same class.
    """
    try:
        yield
    except TbaError as error:
        # in place: a new error would lack its cause, and what it carries beside the text
        error.args = (in_python(str(error)),)
        raise
