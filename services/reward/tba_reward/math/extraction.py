r"""Find the answer in a response: the last `\boxed{...}` or `<answer>...</answer>` after the reasoning.

The rule (docs/rewards.md has it for users):

1. Text before the last `</think>`, or after a `<think>` that is not closed, is reasoning and holds no answer.
2. A box is `\boxed{...}` or `\fbox{...}` with balanced braces, or `\boxed` and one letter or digit. One that is not
   closed (a response cut by its length limit) is no box; a box within a box belongs to the outer one.
3. The last box is the answer. Boxes directly before it belong to the answer if only a comma, `and` or `or` stands
   between them: `\boxed{1} and \boxed{2}` answers `1, 2`.
4. If no box follows the last `<answer>...</answer>`, this element has the answer: its last box, else its whole content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tba.config.reward import REASONING

_TAG, _TAG_END = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TEXT_AND_OR = r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}"
_SPACE = r"(?:\s|\$|\\[()\[\],;:! ]|\\q?quad|\*)*"
_JOINED = re.compile(
    rf"{_SPACE}(?:,|;|{_TEXT_AND_OR}|\band\b|\bor\b){_SPACE}(?:{_TEXT_AND_OR}|\band\b|\bor\b)?{_SPACE}"
)
MAX_JOIN_CHARS = 80
"""Longest text that may stand between two boxes of one answer."""


@dataclass(frozen=True, slots=True)
class Box:
    """One box of a text: its content, and its place as character positions."""

    content: str
    start: int
    end: int


def after_reasoning(response: str, prompt: str = "") -> str:
    """Return the response without its reasoning: the text after the last end tag, up to an opening tag after that.

    Args:
        prompt: if it ends with an opening tag, as with some chat templates, the response begins inside the reasoning.
    """
    for begin, end in REASONING:
        _, ended, rest = response.rpartition(end)
        # the chat template has opened the reasoning, and the response never ends it
        if not ended and prompt.rstrip().endswith(begin):
            return ""
        # a reasoning that never ends (the response was cut) holds no answer
        response = rest.partition(begin)[0]
    return response


def final_answer(text: str, *, is_cut_at_tag: bool = False) -> str | None:
    """Return the content of the last box or of the last answer element, whichever ends later; None if there is neither.

    Args:
        is_cut_at_tag: whether the last `</answer>` may be missing, because a stop string ended the response.
    """
    before, ended, after = text.rpartition(_TAG_END)
    # the stop string was the end tag, which is not part of the response then
    if is_cut_at_tag and _TAG in after:
        before, ended, after = text, _TAG_END, ""
    _, begun, content = before.rpartition(_TAG)
    if not (begun and ended):
        return boxed_answer(text)
    # a box after the element ends later than it
    found = [boxed_answer(after), boxed_answer(content), content]
    return next(answer for answer in found if answer is not None)


def boxed_answer(text: str) -> str | None:
    """Return the content of the last box; if it ends a list of boxes, all joined by `, `; None if no box is closed.

    Time is linear in the length of the text.
    """
    boxes = find_boxes(text)
    if not boxes:
        return None
    parts = [boxes[-1].content]
    for left, right in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        # the bound keeps the time linear: a long text between boxes is never matched
        if right.start - left.end > MAX_JOIN_CHARS or not _JOINED.fullmatch(text, left.end, right.start):
            break
        parts.append(left.content)
    # the same box twice is one answer
    return ", ".join(reversed(list(dict.fromkeys(parts))))


def find_boxes(text: str) -> list[Box]:
    """Return the outermost closed boxes, in order."""
    openings = list(_BOX.finditer(text))
    # the place of the closing brace by that of its opening brace; `\{` and `\}` are signs, not braces
    open_braces, closing = list[int](), dict[int, int]()
    for match in _BRACE.finditer(text) if openings else ():
        if match.group() == "{":
            open_braces.append(match.start())
        elif match.group() == "}" and open_braces:
            closing[open_braces.pop()] = match.start()
    boxes: list[Box] = []
    for match in openings:
        inner = match.end()
        # a box within a box belongs to the outer one
        if boxes and match.start() < boxes[-1].end:
            continue
        if inner in closing:
            boxes.append(Box(_BOX.sub("", text[inner + 1 : closing[inner]]), match.start(), closing[inner] + 1))
        elif text[inner : inner + 1].isalnum():
            boxes.append(Box(text[inner], match.start(), inner + 1))
    return boxes
