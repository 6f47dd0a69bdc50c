"""Field types and bounds that bodies, wire formats and the config share, and the base of their models.

Numbers from outside (REST bodies, the wire, score replies) are quantities: rewards, log-probs, counts, times, steps,
gauges. None comes near MAX_NUMBER in a run that works. Below it sums, means and squares of all that Redis can hold
stay finite, in float32 too, and whole numbers are exact as floats, in JSON and in Lua. Larger numbers, infinity and NaN
are refused, or become unknown where the rest of a message is worth keeping. Two things are no quantities: seeds
(MAX_SEED), and the data of a prompt, where a gold answer may have any size (MAX_DIGITS).

Texts from outside are shown in logs, in the audit and on terminals. A control character in them forges a second line,
rewrites an operator's terminal, or reverses the writing direction. An id with one is refused; in a reason, which is
free text, a space takes its place; anything older is printed with escapes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, Strict, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from tba.tls import check_bare_url

MAX_NUMBER = 10**15
MAX_LINEAGE = 10**9 - 1
MAX_STEP = 10**12 - 1
"""The largest step that the text of a policy version can hold."""
MAX_SEED = 2**63 - 1
"""The largest integer that msgpack, numpy and torch all take."""
MAX_DIGITS = 1000
"""Most digits of a whole number in a prompt's data; Python parses none of more than 4,300."""


def first_problem(error: ValidationError, *, whole: str = "document") -> str:
    """Return the first problem of a document as PLACE: MESSAGE.

    Args:
        whole: the name of the document, for a problem of no field.
    """
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {own_words(first['msg'])}"


def own_words(message: str) -> str:
    """Return a message of pydantic without what it puts before those of our validators."""
    return message.removeprefix("Value error, ")


def is_bounded(value: float) -> bool:
    """Return whether a number may enter; False for NaN."""
    return -MAX_NUMBER <= value <= MAX_NUMBER


def bounded(value: float) -> float:
    """Return the number."""
    if not is_bounded(value):
        raise ValueError(f"every number must be from -{MAX_NUMBER:g} to {MAX_NUMBER:g}; send the right number, or null")
    return value


def bounded_or_none(value: float | None) -> float | None:
    """Return the number as a float; None, which means unknown, if it may not enter."""
    return float(value) if value is not None and is_bounded(value) else None


def mean(values: Iterable[float]) -> float | None:
    """Return the mean; None without values.

    Raises:
        OverflowError: the values are older than MAX_NUMBER, and their sum is not finite.
    """
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""C0, delete, C1, line and paragraph separators, and marks that change the writing direction."""
_CONTROLS = re.compile(f"(?:{_CONTROL.pattern})+")


def control_character_error(text: str) -> str | None:
    """Return what is wrong with an id; None if it has no control character."""
    if text.isprintable():
        return None
    found = _CONTROL.search(text)
    if found is None:
        return None
    return f"holds the control character U+{ord(found.group()):04X}; leave it out"


def one_line(text: str) -> str:
    """Replace each run of control characters by a space, and strip the ends."""
    return _CONTROLS.sub(" ", text).strip() if _CONTROL.search(text) else text


def escape_controls(text: str) -> str:
    """Replace control characters by escapes such as \\x1b, for a line that is printed."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


class StrictModel(BaseModel):
    """A config section or a REST body: a key that is not in the model is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each field by the docstring below it.

        pydantic's `use_attribute_docstrings` does so when a class is made: 0.2 s of every process and every command.
        """
        document = handler(schema)
        properties = handler.resolve_ref_schema(document).get("properties", {})
        names = {field.alias or name: name for name, field in cls.model_fields.items()}
        texts = attribute_docstrings(cls)
        for name in properties.keys() & names.keys():
            if text := texts.get(names[name]):
                properties[name].setdefault("description", text)
        return document


def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a model; fields without one are left out."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or not base.__annotations__:
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made at run time, or installed without sources
            continue
        # a class in a function is indented as a whole, but the texts in it may begin at the left edge
        tree = ast.parse("if True:\n" + source if source[0].isspace() else source)
        definition = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        for field, below in itertools.pairwise([*definition.body, None]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                texts.pop(field.target.id, None)  # a field that is defined again has another text
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    texts[field.target.id] = inspect.cleandoc(str(below.value.value))
    return texts


RunState = Literal["running", "paused", "stopping", "done", "failed"]
Split = Literal["train", "heldout"]
VersionText = Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,12}$")]
MAX_REASON_CHARS = 10_000


def _without_controls(text: str) -> str:
    if problem := control_character_error(text):
        raise ValueError(problem)
    return text


Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_without_controls)]
"""An id or another short text from a client; control characters are refused."""
Reason = Annotated[str, Field(max_length=MAX_REASON_CHARS), AfterValidator(one_line)]
"""The reason for a request, for people; a space takes the place of control characters."""
BareUrl = Annotated[str, AfterValidator(check_bare_url)]
"""An address without user, password and options, which no request would carry."""
Integer = Annotated[int, Strict(), AfterValidator(bounded)]
"""A whole number of a request; `true` and `"1"` are refused. Further bounds go into Field, because pydantic does not
combine two bounds of one kind."""
Number = Annotated[float, Strict(), AfterValidator(bounded)]
"""A number of a request; `true` and `"1"` are refused."""


class Problem(StrictModel):
    """RFC 9457 problem document."""

    type: str
    title: str
    status: int
    detail: str
    retry_after_s: float | None = None
    wait: str | None = None
