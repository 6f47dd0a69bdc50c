"""Field types and bounds that bodies, wire formats and the config share, and the base of their models.

Numbers from outside (REST bodies, the wire, score replies) are rewards, log-probs, counts, times, steps or gauges. In a
run that works, none of them comes near MAX_NUMBER. Below it, sums, means and squares of all numbers in Redis stay
finite, in float32 too. Whole numbers are exact as floats, in JSON and in Lua. Larger numbers, infinity and NaN are
refused, or are treated as unknown if the rest of a message is worth keeping. Two kinds of numbers have other limits:
seeds (MAX_SEED), and whole numbers in the data of a prompt, such as a gold answer (MAX_DIGITS).

Texts from outside are shown in logs, in the audit and on terminals. A control character in them could forge a second
line, rewrite an operator's terminal, or reverse the writing direction. An id with one is refused. In a reason, which is
free text, it is replaced by a space. Texts stored by older releases are printed with escapes.
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
    """Return the first problem in a validation error as PLACE: MESSAGE.

    Args:
        whole: the PLACE of a problem that belongs to no field.
    """
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {own_words(first['msg'])}"


def own_words(message: str) -> str:
    """Return a message of pydantic without the prefix "Value error, ", which it adds to messages of our validators."""
    return message.removeprefix("Value error, ")


def is_bounded(value: float) -> bool:
    """Return whether a number is at most MAX_NUMBER in absolute value; False for NaN."""
    return -MAX_NUMBER <= value <= MAX_NUMBER


def bounded(value: float) -> float:
    """Return the number; raise ValueError if it is not bounded (`is_bounded`)."""
    if not is_bounded(value):
        raise ValueError(f"every number must be from -{MAX_NUMBER:g} to {MAX_NUMBER:g}; send the right number, or null")
    return value


def bounded_or_none(value: float | None) -> float | None:
    """Return the number as a float if it is bounded; else None, which means unknown."""
    return float(value) if value is not None and is_bounded(value) else None


def mean(values: Iterable[float]) -> float | None:
    """Return the mean; None if there are no values.

    Raises:
        OverflowError: the sum is not finite. An older release, without MAX_NUMBER, may have stored such values.
    """
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters: C0, delete, C1, line and paragraph separators, marks that change the writing direction."""
_CONTROLS = re.compile(f"(?:{_CONTROL.pattern})+")


def control_character_error(text: str) -> str | None:
    """Return a sentence about a control character in an id; None if it has none."""
    if text.isprintable():
        return None
    found = _CONTROL.search(text)
    if found is None:
        return None
    return f"holds the control character U+{ord(found.group()):04X}; leave it out"


def one_line(text: str) -> str:
    """Replace each run of control characters by a space, and strip white space from both ends."""
    return _CONTROLS.sub(" ", text).strip() if _CONTROL.search(text) else text


def escape_controls(text: str) -> str:
    """Replace control characters by escapes such as \\x1b, for a line that is printed."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


class StrictModel(BaseModel):
    """Base of config sections and REST bodies: immutable, and a key that the model lacks is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema, in which the docstring below each field is its description.

        pydantic's `use_attribute_docstrings` reads them when a class is made, which costs every process 0.2 s.
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
    """Return field name -> docstring below the field, for all fields of a model that have one."""
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
"""The reason for a request, for people; control characters are replaced by spaces."""
ParseStatus = Literal["ok", "invalid_json", "unclosed_block", "missing_name", "malformed_structure", "unknown_tool"]
"""What a tool call of a reply was; only one that is `ok` may be executed."""
Boundary = Literal["engine", "environment", "tool", "sandbox", "judge", "limit"]
"""The part that an episode failed in."""
BareUrl = Annotated[str, AfterValidator(check_bare_url)]
"""A URL without user, password and options, which requests would not send."""
Integer = Annotated[int, Strict(), AfterValidator(bounded)]
"""A whole number in a request; `true` and `"1"` are refused. A validator checks MAX_NUMBER, so that Field can add a
narrower bound: pydantic does not combine two bounds of one kind."""
Number = Annotated[float, Strict(), AfterValidator(bounded)]
"""A number in a request; `true` and `"1"` are refused."""


class Problem(StrictModel):
    """RFC 9457 problem document."""

    type: str
    title: str
    status: int
    detail: str
    retry_after_s: float | None = None
    wait: str | None = None
