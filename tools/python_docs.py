"""Write docs/python-api.md, the reference of `import tba`, from signatures and docstrings: `make python-docs`.

griffe, which mkdocstrings uses too, reads the source and imports nothing. The page has all that `tba` gives, every
class that a call returns, and those that their fields hold. With --check nothing is written, and the exit code is 1
when the page differs from the code. A public argument or member without a docstring is an error.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
from griffe import Alias, Attribute, Class, DocstringSectionKind, Expr, ExprName, Function, Object, ParameterKind

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python-api.md"
HEAD = """\
# Python reference

All that `import tba` gives, from signatures and docstrings; `make python-docs` writes this page. The guide, with a run
from beginning to end, is [python.md](python.md). `tba.__version__` is the version of the package.
"""
RESULTS = """\
## Results

What calls return and take besides: immutable pydantic models of `tba.api`, which `.model_dump()` makes dicts of. Times
in `at_s` are Unix seconds, all other `_s` are durations in seconds, versions are texts `LINEAGE-STEP`.
"""
ERRORS = """\
## Errors

They are in `tba.errors`. A message says what is wrong, which value, and what to do.
"""
MAX_LINE = 100
MODEL_BASES = ("StrictModel", "TypedDict")
Sections = dict[DocstringSectionKind, griffe.DocstringSection]


class Reference:
    """The source of the packages, and which of their classes the page has to describe.

    Raises:
        SystemExit: a public argument or member has no docstring.
    """

    def __init__(self) -> None:
        loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser="google", allow_inspection=False)
        self._packages = {name: loader.load(name) for name in ("tba", "tba_cli")}
        loader.resolve_aliases(implicit=True)
        self._reached: list[Class] = []

    def page(self) -> str:
        """Return the page."""
        given = self._packages["tba_cli"]["scripting"]
        run, *classes = (given[name].final_target for name in ("run", "Run", "Table", "Listing", "Rollouts"))
        self._reached = list(classes)
        parts = ["## tba.run\n", *self._function(run, "tba.run")]
        parts += ["## class tba.Run\n", *self._class(classes[0], "tba.Run")]
        parts += itertools.chain(*map(self._described, classes[1:]))
        # the list grows meanwhile: a class that is described may reach others
        results = [*itertools.chain(*map(self._described, itertools.islice(self._reached, len(classes), None)))]
        index = [("[tba.run](#tbarun)", _summary(run)), *((self._link(it), _summary(it)) for it in classes)]
        index += [("[Results](#results)", "The other objects."), ("[Errors](#errors)", "What may be raised.")]
        models = [(self._link(it), _summary(it)) for it in self._reached[len(classes) :]]
        lines = [HEAD, *_table("name | meaning", index), *parts, RESULTS, *_table("name | meaning", models), *results]
        return "\n".join([*lines, ERRORS, *self._errors()])

    # ---- Parts of the page ----

    def _described(self, it: Class) -> list[str]:
        return [f"### class {it.name}\n", *self._class(it, it.name)]

    def _function(self, it: Function, name: str) -> Iterator[str]:
        sections = _sections(it)
        yield f"```python\n{self._signature(it, name)}\n```\n"
        yield from _text(sections)
        described = {row.name.lstrip("*"): row.description for row in _rows(sections, DocstringSectionKind.parameters)}
        missing = [row.name for row in _parameters(it) if row.name not in described]
        if missing:
            raise SystemExit(f"error: {it.path} has arguments that its docstring leaves out: {', '.join(missing)}")
        if described:
            yield from _table("argument | meaning", ((f"`{key}`", text) for key, text in described.items()))
        for row in _rows(sections, DocstringSectionKind.returns):
            yield f"Returns: {_linked(row.description)}\n"
        raised = [(f"`{row.annotation}`", row.description) for row in _rows(sections, DocstringSectionKind.raises)]
        if raised:
            yield from _table("raises | when", raised)
        yield from _example(sections)

    def _class(self, it: Class, name: str) -> Iterator[str]:
        sections = _sections(it)
        bases = [base for base in map(self._resolved, it.bases) if isinstance(base, Class)]
        if "__init__" in it.members and name.startswith("tba."):
            yield f"```python\n{self._signature(it['__init__'], name)}\n```\n"
        yield from _text(sections)
        rows = [(f"`{row.name}`", row.description) for row in _rows(sections, DocstringSectionKind.parameters)]
        if rows and name.startswith("tba."):
            yield from _table("argument | meaning", rows)
        yield from _example(sections)
        for base in bases:
            if base.name not in MODEL_BASES and base.path.startswith("tba"):
                self._reach(base)
                yield f"With all that {self._link(base)} has.\n"
        members = [member for member in it.members.values() if _is_public(member)]
        if self._is_model(it):
            yield from _table("field | type | meaning", [self._field(member) for member in members])
            return
        if not it.has_docstring or not all(member.has_docstring for member in members):
            raise SystemExit(f"error: {it.path} or a member of it has no docstring")
        called = {row.name: f"{row.name}()" if isinstance(row, Function) else row.name for row in members}
        index = [(f"[{called[row.name]}](#{it.name.lower()}{row.name})", _summary(row)) for row in members]
        yield from _table("member | meaning", index)
        for member in members:
            level = "###" if name.startswith("tba.") else "####"
            yield f"{level} {it.name}.{member.name}\n"
            if isinstance(member, Function):
                yield from self._function(member, member.name)
            elif isinstance(member, Attribute):
                yield f"```python\n{member.name}: {self._type(member.annotation)}\n```\n"
                yield from _text(_sections(member))

    def _is_model(self, it: Class) -> bool:
        bases = [(str(base), self._resolved(base)) for base in it.bases]
        return any(name in MODEL_BASES or (isinstance(base, Class) and self._is_model(base)) for name, base in bases)

    def _field(self, it: Object | Alias) -> tuple[str, str, str]:
        if isinstance(it, Function):
            call = f"{it.name}({', '.join(row.name for row in _parameters(it))})"
            return f"`{call}`", self._type(it.returns, with_links=True), _summary(it)
        annotation = it.annotation if isinstance(it, Attribute) else None
        return f"`{it.name}`", self._type(annotation, with_links=True), _summary(it, whole=True)

    def _errors(self) -> Iterator[str]:
        module = self._packages["tba"]["errors"]
        kinds = [it for it in module.members.values() if isinstance(it, Class) and it.has_docstring]
        yield from _table(
            "error | is a | meaning",
            ((f"`{it.name}`", ", ".join(f"`{base}`" for base in it.bases), _summary(it, whole=True)) for it in kinds),
        )

    # ---- Types ----

    def _signature(self, it: Function, name: str) -> str:
        shown, star = [], False
        for row in _parameters(it):
            if row.kind is ParameterKind.keyword_only and not star:
                shown, star = [*shown, "*"], True
            mark = "**" if row.kind is ParameterKind.var_keyword else ""
            default = "" if row.default is None or mark else f" = {self._type(row.default)}"
            shown.append(f"{mark}{row.name}: {self._type(row.annotation)}{default}")
        returns = f" -> {self._type(it.returns)}" if it.name != "__init__" else ""
        line = f"{name}({', '.join(shown)}){returns}"
        if len(line) <= MAX_LINE:
            return line
        return f"{name}(\n" + "".join(f"    {text},\n" for text in shown) + f"){returns}"

    def _type(self, annotation: str | Expr | None, *, with_links: bool = False) -> str:
        """Return a type as text; own names of other types (`RolloutOrder`) are replaced by what they stand for."""
        if not isinstance(annotation, Expr):
            return str(annotation).replace("'", '"')
        text = ""
        for part in annotation.iterate(flat=True):
            target = self._resolved(part) if isinstance(part, ExprName) else None
            if isinstance(target, Attribute) and not isinstance(target.value, griffe.ExprCall):  # no TypeVar
                text += self._type(_without_bounds(target.value), with_links=with_links)
            elif isinstance(target, Class) and target.path.startswith("tba"):
                self._reach(target)
                text += self._link(target) if with_links else target.name
            else:
                text += str(part)
        return text.replace("'", '"')

    def _link(self, it: Class) -> str:
        return "[tba.Run](#class-tbarun)" if it is self._reached[0] else f"[{it.name}](#class-{it.name.lower()})"

    def _resolved(self, name: str | Expr) -> Object | None:
        """Return what a name means, if it is of these packages."""
        path = name.canonical_path if isinstance(name, Expr) else name
        package, _, rest = path.partition(".")
        try:
            found = self._packages[package][rest]
        except KeyError:
            return None
        return found.final_target if found.is_alias else found

    def _reach(self, it: Class) -> None:
        if it not in self._reached:
            self._reached.append(it)


def _without_bounds(value: str | Expr | None) -> str | Expr | None:
    """Return the type in `Annotated[type, bounds]`."""
    if isinstance(value, griffe.ExprSubscript) and str(value.left) == "Annotated":
        inner = value.slice
        return inner.elements[0] if isinstance(inner, griffe.ExprTuple) else inner
    return value


def _parameters(it: Function) -> list[griffe.Parameter]:
    return [row for row in it.parameters if row.name != "self"]


def _is_public(it: Object | Alias) -> bool:
    return not it.name.startswith("_") and not it.is_alias


def _sections(it: Object) -> Sections:
    return {section.kind: section for section in it.docstring.parsed} if it.docstring else {}


def _rows(sections: Sections, kind: DocstringSectionKind) -> list:
    return sections[kind].value if kind in sections else []


def _text(sections: Sections) -> Iterator[str]:
    if DocstringSectionKind.text in sections:
        yield f"{_linked(sections[DocstringSectionKind.text].value)}\n"


def _example(sections: Sections) -> Iterator[str]:
    for kind, text in _rows(sections, DocstringSectionKind.examples):
        code = re.sub(r"(?m)^(>>>|\.\.\.) ?", "", text)
        yield f"```python\n{code}\n```\n" if kind is DocstringSectionKind.examples else f"{text}\n"


def _summary(it: Object | Alias, *, whole: bool = False) -> str:
    text = it.docstring.value if it.docstring else ""
    return text if whole else text.partition("\n\n")[0]


def _table(head: str, rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {head} |\n|{'---|' * (head.count('|') + 1)}"
    yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)
    yield ""


def _cell(text: str) -> str:
    return " ".join(_linked(text).replace("|", "\\|").split())


def _linked(text: str) -> str:
    """Make links of the pages that a docstring names."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


def main() -> int:
    """Write the page, or compare it with the code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    args = parser.parse_args()
    text = Reference().page()
    if args.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
