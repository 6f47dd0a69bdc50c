"""Text files and pipes name their encoding: that of the locale may lack a character, or read another one."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
READS_TEXT = {"read_text", "write_text"}
OPENS = {"open", "fdopen", "NamedTemporaryFile", "TemporaryFile"}
PIPES = {"run", "Popen", "check_output"}
NOT_OF_FILES = {"os.open", "webbrowser.open", "tarfile.open"}


def lacks_encoding(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    words = {word.arg: word.value for word in call.keywords}
    if "encoding" in words or name in NOT_OF_FILES:
        return False
    if last in OPENS:
        texts = [node.value for node in (*call.args, *words.values()) if isinstance(node, ast.Constant)]
        modes = [text for text in texts if isinstance(text, str) and set(text) <= set("rwxabt+") and len(text) <= 3]
        # `.open(...)` without a mode may be of anything; the built-in one is of a text file
        return not any("b" in mode for mode in modes) and (bool(modes) or name == "open")
    return last in READS_TEXT or (last in PIPES and bool({"text", "errors", "universal_newlines"} & set(words)))


def test_every_text_of_the_product_names_its_encoding() -> None:
    paths = [path for folder in ("tba", "tba_cli", "services") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 300
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and lacks_encoding(node)
    ]
    assert found == []
