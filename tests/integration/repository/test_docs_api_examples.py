"""The walk through every endpoint in docs/api.md works, and leaves none out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.api_documents import PAGE, operations
from tests.support.buffer_fixtures import ServeBuffer

BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CURL = re.compile(r'curl -sSf?(?: -X (\w+))? "\$(?:BUFFER|REWARD|FRESH|service)(/[^"?]*)')


def blocks() -> list[tuple[str, str]]:
    """(language, text) of the examples, in order."""
    return BLOCK.findall(PAGE.read_text())


def test_the_examples_work(
    serve_buffer: ServeBuffer, reward_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"store": {"url": f"file://{tmp_path / 'store'}"}, "reward": {"url": reward_url}}
    few = {"prompts_per_batch": 2, "group_size": 2, "rollouts_per_visit": 4, "min_size_to_sample": 4}
    monkeypatch.setenv("BUFFER", serve_buffer(**sections, sampling=few).url)
    monkeypatch.setenv("FRESH", serve_buffer(run="fresh", **sections).url)
    monkeypatch.setenv("REWARD", reward_url)
    names: dict[str, object] = {}
    for language, text in blocks():
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), names)
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], env=os.environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


def test_the_examples_call_every_endpoint() -> None:
    text = "\n".join(text for _, text in blocks())
    called = {(method or "GET", path) for method, path in CURL.findall(text)}
    methods = set(re.findall(r"\bclient\.(\w+)\(", text))
    missing = [
        (method, path)
        for method, path, operation in operations()
        if operation["operationId"] not in methods
        and not any(method == m and re.fullmatch(re.sub(r"\{\w+\}", r"[^/]+", path), p) for m, p in called)
        and f"# {method} {path}\n" not in text
    ]
    assert missing == []
