"""Print figures about the structure of the code: files, sizes, comments, definitions, imports between modules.

    python tools/structure.py [ROOT]
    python tools/structure.py --budget
    python tools/structure.py --unset-keys

ROOT is a checkout, default this one; docs/adr/0019-rooms.md holds the figures before and after the rooms. `--budget`
compares this checkout with the numbers of pyproject.toml; a number above its budget ends it with exit code 1.
`--unset-keys` prints the keys of a recipe that nothing shipped sets (tools/recipe_keys.py). Lines of code are those of
Python.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))  # for the other tools, the parser and the chart's tools, which `python tools/...` lacks
PACKAGES = {"tba": "tba", "tba_cli": "tba_cli"} | {
    f"tba_{it}": it for it in ("buffer", "trainer", "searcher", "reward")
}
"""Packages, and their names in the budget."""
RECIPE = {"run": {"name": "figures"}, "model": {"path": "figures"}, "data": {"generator": "addition"}}


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
    """Return the modules of the product that `text` imports, inside functions too."""
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


def lines_below(folder: Path, pattern: str = "**/*.py") -> int:
    """Return the number of lines of the files in a folder, 0 where it does not exist."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob(pattern))


def sizes(root: Path) -> dict[str, int]:
    """Return the current number for each entry of the budget in pyproject.toml, by its name there."""
    from tools import recipe_keys

    texts = {name: path.read_text(encoding="utf-8") for name, path in product_files(root).items()}
    lines = Counter[str]()
    for name, text in texts.items():
        lines[name.partition(".")[0]] += len(text.splitlines())
    return {
        "product_lines": lines.total(),
        "product_code_lines": sum(map(code_lines, texts.values())),
        **{f"{name}_lines": lines[package] for package, name in PACKAGES.items()},
        **{f"{folder}_lines": lines_below(root / folder) for folder in ("tests", "benchmarks", "studies")},
        "docs_lines": lines_below(root / "docs", "*.md"),  # without decisions (docs/adr)
        "recipe_keys": len(recipe_keys.all_keys()),
        "unset_recipe_keys": len(recipe_keys.unset_keys(root)),
    }


def budget(root: Path) -> dict[str, int]:
    """Return the numbers of `[tool.tba.budget]`."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["tba"]["budget"]


def compare(now: dict[str, int], allowed: dict[str, int]) -> tuple[str, list[str]]:
    """Return a table of all numbers and their budgets, and a sentence for each number without or above its budget."""
    rows = [f"{'what':<20} {'now':>8} {'budget':>8}"]
    rows += [
        f"{name:<20} {num:>8,} {format(allowed[name], ',') if name in allowed else '':>8}" for name, num in now.items()
    ]
    wrong = [f"{name} has no budget; give it one in [tool.tba.budget]" for name in now.keys() - allowed]
    wrong += [f"{name} is no number of this tool; remove it from [tool.tba.budget]" for name in allowed.keys() - now]
    for name in now.keys() & allowed:
        if (above := now[name] - allowed[name]) > 0:
            wrong.append(
                f"{name} is {now[name]:,}, {above:,} above its budget of {allowed[name]:,}; see CONTRIBUTING.md"
            )
    return "\n".join(rows), sorted(wrong)


def surface(root: Path) -> dict[str, int]:
    """Return how many names a user meets: commands and flags, endpoints, values of the chart."""
    import yaml
    from tba_buffer.api.app import build_app as build_buffer
    from tba_reward.app import build_app as build_reward

    from tba.config import Recipe
    from tba_cli.parser import build_parser, commands_of

    def num_leaves(tree: Any) -> int:
        return sum(map(num_leaves, tree.values())) if isinstance(tree, dict) and tree else 1

    commands = [command.parser for command in commands_of(build_parser())]
    flags = [action.option_strings for parser in commands for action in parser._actions if action.option_strings]
    recipe = Recipe.model_validate(RECIPE)
    services = [build_buffer(recipe, None).openapi(), build_reward(recipe, tokens=None).openapi()]
    operations = {(path, method) for document in services for path, it in document["paths"].items() for method in it}
    values = yaml.safe_load((root / "charts" / "tba" / "values.yaml").read_text(encoding="utf-8"))
    return {
        "commands": len(commands),
        "flags": len(flags) - len(commands),  # without --help
        "endpoints": len(operations),
        "chart values": num_leaves(values),
    }


def main() -> int:
    """Print what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="ROOT", type=Path, nargs="?", default=HERE)
    parser.add_argument("--budget", action="store_true", help="compare with the budget in pyproject.toml")
    parser.add_argument("--unset-keys", action="store_true", help="print the keys that nothing shipped sets")
    args = parser.parse_args()
    if args.unset_keys:
        from tools import recipe_keys

        print(*sorted(recipe_keys.unset_keys(args.root)), sep="\n")
        return 0
    if args.budget:
        table, wrong = compare(sizes(args.root), budget(args.root))
        print(table, *wrong, sep="\n")
        return 1 if wrong else 0
    print_figures(args.root)
    return 0


def print_figures(root: Path) -> None:
    """Print the figures of one checkout."""
    modules = product_files(root)
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    sizes = [len(text.splitlines()) for text in texts.values()]
    code = {name: code_lines(text) for name, text in texts.items()}
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    num_classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    num_functions = sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)
    print(f"files                        {len(sizes)}")
    print(f"lines                        {sum(sizes)}")
    print(f"code lines                   {sum(code.values())}")
    print(f"median lines of a file       {statistics.median(sizes):g}")
    print(f"comments per 100 code lines  {100 * sum(map(num_comments, texts.values())) / sum(code.values()):.1f}")
    print(f"classes per 1,000 lines      {1000 * num_classes / sum(sizes):.1f}")
    print(f"functions per 1,000 lines    {1000 * num_functions / sum(sizes):.1f}")
    arrows, packages = Counter[str](), Counter[str]()
    for name, text in texts.items():
        package = name.partition(".")[0]
        packages[package] += 1
        arrows[package] += sum(other.partition(".")[0] == package for other in imports_of(text, modules))
    for package, num in sorted(packages.items()):
        print(f"{package:<28} {num} files, {arrows[package]} imports inside the package")
    num_files = len(list((root / "tests").rglob("*.py")))
    print(f"{'tests':<28} {num_files} files, {lines_below(root / 'tests')} lines")
    if root.resolve() == HERE:
        for name, num in surface(root).items():
            print(f"{name:<28} {num}")


if __name__ == "__main__":
    sys.exit(main())
