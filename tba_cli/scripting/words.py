"""Errors in the words of Python: commands and shared functions name flags of `tba`, which a script does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tba.errors import TbaError

_REPLACED = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        # before the single flags
        (
            r"take the changes with --take-changes, or continue as it began with: \S.* run (\S+) --resume",
            r'continue as it began with tba.run("\1", resume=True), and give changes as sets=[...]',
        ),
        (r"give --run-dir DIR or --url URL", "give the path of its folder or url=..."),
        (r"`tba run RECIPE`", "`tba.run(recipe)`"),
        (r"--set ([\w.]+=[\w./-]+)(?=[\s,;]|$)", r'sets=["\1"]'),
        (r"--set\b", "sets"),
        (r"--(resume|fresh|public)\b", r"\1=True"),
        (r"--run-name\b", "name=..."),
        (r"--(url|version)(?: (?:URL|VERSION))?(?=[\s,;]|$)", r"\1=..."),
        (r"--(out|recipe)\b", r"\1"),
        (r"--push-to-hub\b", "push_to_hub"),
    )
)
"""What a message says to a shell -> what it says to a script; the first ones first."""


def in_python(text: str) -> str:
    """Return a message with the arguments of `tba.run` and `tba.Run` in place of flags."""
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
        text = str(error)
        if (said := in_python(text)) == text:
            raise
        raise type(error)(said) from None
