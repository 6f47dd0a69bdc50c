"""Print figures about the structure of the code: files, sizes, comments, definitions, imports between modules.

    python tools/structure.py [ROOT]

ROOT is a checkout, default this one; docs/adr/0019-rooms.md holds the figures before and after the rooms.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
SMALL_CODE_LINES, LARGE_CODE_LINES = 40, 400


def product_files(root: Path) -> dict[str, Path]:
    """Return module name -> file of every package of the product."""
    found = {}
    for top in (root, *sorted((root / "services").iterdir())):
        for package in sorted(top.glob("tba*")):
            for path in sorted(package.rglob("*.py")):
                found[".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def code_lines(text: str) -> int:
    """Return the number of lines that hold code: no comments, no docstrings, no blank lines."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def num_comments(text: str) -> int:
    """Return the number of lines that hold a comment, alone or behind code."""
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def imports_of(text: str, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the product that `text` imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module or "" for name in names]
        else:
            continue
        found.update(name for name in names if name in modules)
    return found


def main() -> None:
    """Print the figures of one checkout."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    modules = product_files(root)
    texts = {name: path.read_text() for name, path in modules.items()}
    sizes = [len(text.splitlines()) for text in texts.values()]
    code = {name: code_lines(text) for name, text in texts.items()}
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    num_classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    num_functions = sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)
    own = {name for name, path in modules.items() if path.stem not in ("__init__", "__main__")}
    print(f"files                        {len(sizes)}")
    print(f"lines                        {sum(sizes)}")
    print(f"code lines                   {sum(code.values())}")
    print(f"median lines of a file       {statistics.median(sizes):g}")
    print(f"comments per 100 code lines  {100 * sum(map(num_comments, texts.values())) / sum(code.values()):.1f}")
    print(f"classes per 1,000 lines      {1000 * num_classes / sum(sizes):.1f}")
    print(f"functions per 1,000 lines    {1000 * num_functions / sum(sizes):.1f}")
    print(f"files below {SMALL_CODE_LINES} code lines    {sum(code[name] < SMALL_CODE_LINES for name in own)}")
    print(f"files above {LARGE_CODE_LINES} code lines   {sum(code[name] > LARGE_CODE_LINES for name in own)}")
    arrows, packages = Counter[str](), Counter[str]()
    for name, text in texts.items():
        package = name.partition(".")[0]
        packages[package] += 1
        arrows[package] += sum(other.partition(".")[0] == package for other in imports_of(text, modules))
    for package, num in sorted(packages.items()):
        print(f"{package:<28} {num} files, {arrows[package]} imports inside the package")
    tests = list((root / "tests").rglob("*.py"))
    print(
        f"tests                        {len(tests)} files, {sum(len(t.read_text().splitlines()) for t in tests)} lines"
    )


if __name__ == "__main__":
    main()
