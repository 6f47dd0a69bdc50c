"""Measure the sentences of README, docs, docstrings and messages: how long they are, and how they begin.

    python tools/prose.py [PAGE ...]
    python tools/prose.py --check

Named pages are measured instead of all. A sentence has 4 words or more; text in backticks is one word. Tables, code,
headings and decisions (docs/adr) are left out. `--check` ends with exit code 1 when README has a sentence of over 30
words, or when more than 3 % of the sentences of docs/ have. `make lint` calls it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LONG_WORDS = 30
MAX_LONG_SHARE = 0.03
"""Largest share of sentences over `LONG_WORDS` words in docs/; README may have none."""
LIMITS_WORDS = (25, LONG_WORDS, 35)
MIN_WORDS = 4
NUM_LONGEST = 10

BAD_BEGINNING = re.compile(r"(?:As of|Of|What|Who|Whose)\b")
CODE = re.compile(r"`+[^`]+`+")
LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
MARKS = re.compile(r"\*\*|__|<!--.*?-->|</?[a-z][^>]*>")
# names such as tba and vLLM begin sentences as they are
END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)(?<!\.\.\.)[\"')\]]*\s+")
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
COLUMNS = re.compile(r".*\S {2,}\S|\s*\|")
"""A row of a table, as docstrings have it."""
SECTION = re.compile(r"(?:Args|Attributes|Raises|Returns|Yields|Example|Examples|Note):")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence, and the file that has it."""

    where: str
    text: str

    @property
    def num_words(self) -> int:
        """Number of words, which spaces separate; a dash between spaces does not count."""
        return sum(any(map(str.isalnum, word)) for word in self.text.split())


def sentences(paragraphs: Iterable[str], where: str) -> list[Sentence]:
    """Return the sentences of paragraphs that are long enough to count."""
    found = []
    for paragraph in paragraphs:
        plain = MARKS.sub("", LINK.sub(r"\1", CODE.sub("CODE", paragraph)))
        found += [Sentence(where, text) for text in END.split(" ".join(plain.split()))]
    return [sentence for sentence in found if sentence.num_words >= MIN_WORDS]


def paragraphs_of_page(text: str) -> Iterator[str]:
    """Yield the paragraphs and the list items of a Markdown page, without code, tables and headings."""
    lines: list[str] = []
    fenced = False
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        item = LIST_ITEM.match(line)
        is_code = fenced or (line.startswith("    ") and not lines)
        is_text = not fence and not is_code and line.strip() and not line.lstrip().startswith(("|", "#", "<!--", "---"))
        if lines and (item or not is_text):
            yield " ".join(lines)
            lines = []
        if is_text:
            lines.append(line[item.end() :] if item else line.strip(" >"))


def paragraphs_of_docstring(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring and the entries of its sections, without code and tables."""
    lines: list[str] = []
    in_section = False
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        heads = SECTION.fullmatch(line) is not None
        in_section = heads or (in_section and (indent > 0 or not line))
        entry = in_section and indent == 4
        item = LIST_ITEM.match(line)
        is_plain = line.strip() and not heads and not COLUMNS.match(line)
        is_text = is_plain and (in_section or indent == 0 or bool(lines) or item)
        if lines and (entry or item or not is_text):
            yield " ".join(lines)
            lines = []
        if is_text:
            lines.append(line[item.end() :] if item else line.strip())


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a module, of its definitions and of its attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of raise statements, with one word for each value in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _texts(node.exc)


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def of_pages(pages: Iterable[Path], root: Path) -> list[Sentence]:
    """Return the sentences of Markdown pages."""
    found = []
    for page in sorted(pages):
        name = str(page.relative_to(root)) if page.is_relative_to(root) else str(page)
        found += sentences(paragraphs_of_page(page.read_text(encoding="utf-8")), name)
    return found


def measured(root: Path) -> dict[str, list[Sentence]]:
    """Return the sentences of a checkout by the kind of text."""
    found = {
        "README": of_pages([root / "README.md"], root),
        "docs": of_pages((root / "docs").glob("*.md"), root),
    }
    of_docstrings, of_messages = [], []
    for top in (root / "tba", root / "tba_cli", root / "services"):
        for path in sorted(top.rglob("*.py")):
            tree, name = ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(root))
            for text in docstrings(tree):
                of_docstrings += sentences(paragraphs_of_docstring(text), name)
            of_messages += sentences(messages(tree), name)
    return {**found, "docstrings": of_docstrings, "messages": of_messages}


def share_over(found: list[Sentence], num_words: int) -> float:
    """Return the share of the sentences with more than `num_words` words."""
    return sum(sentence.num_words > num_words for sentence in found) / max(1, len(found))


def report(groups: dict[str, list[Sentence]]) -> Iterator[str]:
    """Yield the lines of a report: a table, the longest sentences, and those that begin badly."""
    yield f"{'':<11}{'sentences':>10}{'median':>8}" + "".join(f"{f'over {limit}':>9}" for limit in LIMITS_WORDS)
    for name, found in groups.items():
        median = statistics.median(it.num_words for it in found) if found else 0
        shares = "".join(f"{share_over(found, limit):>9.1%}" for limit in LIMITS_WORDS)
        yield f"{name:<11}{len(found):>10,}{median:>8g}{shares}"
    everything = [sentence for found in groups.values() for sentence in found]
    yield f"\nThe {NUM_LONGEST} longest sentences:"
    for sentence in sorted(everything, key=lambda it: -it.num_words)[:NUM_LONGEST]:
        yield f"{sentence.num_words:>4}  {sentence.where}: {sentence.text}"
    bad = [sentence for sentence in everything if BAD_BEGINNING.match(sentence.text)]
    yield f"\n{len(bad)} sentences begin with Of, As of, What, Who or Whose:"
    for sentence in bad:
        yield f"  {sentence.where}: {' '.join(sentence.text.split()[:8])}"


def faults(groups: dict[str, list[Sentence]]) -> Iterator[str]:
    """Yield a message for each fault that makes --check fail."""
    for sentence in groups["README"]:
        if sentence.num_words > LONG_WORDS:
            yield f"README has a sentence of {sentence.num_words} words, at most {LONG_WORDS}: {sentence.text}"
    share = share_over(groups["docs"], LONG_WORDS)
    if share > MAX_LONG_SHARE:
        yield f"{share:.1%} of the sentences of docs have over {LONG_WORDS} words, at most {MAX_LONG_SHARE:.0%} may"


def main() -> int:
    """Print the report, or what is wrong; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", metavar="PAGE", type=Path, nargs="*", help="Markdown pages instead of everything")
    parser.add_argument("--check", action="store_true", help="fail when README or docs have too long sentences")
    args = parser.parse_args()
    if args.check:
        wrong = list(faults(measured(HERE)))
        print(*wrong, sep="\n", end="\n" if wrong else "")
        return 1 if wrong else 0
    groups = {"pages": of_pages([page.resolve() for page in args.pages], HERE)} if args.pages else measured(HERE)
    print(*report(groups), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
