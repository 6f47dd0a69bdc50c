"""Texts that others give and people read: in logs, in the audit, on a terminal.

A control character there is never meant well: a newline makes two lines of one, an escape sequence recolours,
overwrites or retitles an operator's terminal, and a change of writing direction shows another text than the one that is
stored. So an id with one is refused; a reason, which is free text, gets a space in its place; and what is printed all
the same (stored by an older version, say) is printed as an escape.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""C0, delete, C1, the separators of lines and paragraphs, and what changes the writing direction."""
_CONTROLS = re.compile(f"(?:{_CONTROL.pattern})+")


def control_problem(text: str) -> str | None:
    """What is wrong with an id; None: it has no control character."""
    if text.isprintable():
        return None
    found = _CONTROL.search(text)
    if found is None:
        return None
    return f"holds the control character U+{ord(found.group()):04X}; leave it out"


def one_line(text: str) -> str:
    """Free text without control characters: a space is in the place of each run of them, but not at the ends."""
    return _CONTROLS.sub(" ", text).strip() if _CONTROL.search(text) else text


def shown(text: str) -> str:
    """A line as it may be printed: control characters as escapes such as \\x1b."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
