"""The release: what its script calls is here, and it refuses what is no release."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import tba

ROOT = Path(__file__).parents[3]


def test_what_a_release_calls_exists() -> None:
    text = (ROOT / "deploy" / "release").read_text()
    files = set(re.findall(r"(?:tools|deploy)/[\w-]+\.(?:py|txt)|requirements-\w+\.txt", text))
    assert {"tools/check_wheels.py", "requirements-release.txt", "deploy/build-requirements.txt"} <= files
    assert {name for name in files if not (ROOT / name).is_file()} == set()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "images"):
        assert f"make {target}" in text
        assert re.search(rf"(?m)^{target}:", makefile)
    pins = (ROOT / "requirements-release.txt").read_text() + (ROOT / "deploy" / "build-requirements.txt").read_text()
    lines = [line for line in pins.splitlines() if not line.startswith("#")]
    assert {re.split("[=<>]", line)[0] for line in lines} >= {
        "build",
        "cyclonedx-bom",
        "hatchling",
        "sigstore",
        "twine",
    }
    assert [line for line in lines if "==" not in line] == []


def release(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "deploy" / "release", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent), "REGISTRY": "", **environ},
    )


def test_a_release_is_refused_where_anything_would_be_missing(tmp_path: Path) -> None:
    for name in ("deploy", "tba"):
        (tmp_path / name).mkdir()
    (tmp_path / "deploy" / "release").write_bytes((ROOT / "deploy" / "release").read_bytes())
    (tmp_path / "deploy" / "release").chmod(0o755)
    (tmp_path / "tba" / "__init__.py").write_text(f'__version__ = "{tba.__version__}"\n')
    (tmp_path / "CHANGELOG.md").write_text("")
    flags = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]

    def git(*words: str) -> None:
        subprocess.run(["git", *flags, *words], cwd=tmp_path, check=True, capture_output=True)

    def refusal(*words: str, **environ: str) -> str:
        done = release(tmp_path, *words, **environ)
        assert done.returncode == 2, done.stderr
        return done.stderr

    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    assert f"HEAD has no tag v{tba.__version__}" in refusal()
    git("tag", f"v{tba.__version__}")
    (tmp_path / "CHANGELOG.md").write_text(f"## [{tba.__version__}] - today\n")
    assert "not committed" in refusal()
    git("commit", "-am", "more")
    git("tag", "--force", f"v{tba.__version__}")
    assert "REGISTRY is not set" in refusal()
    assert "TWINE_REPOSITORY_URL is not set" in refusal(REGISTRY="registry.example/")
    away = {"REGISTRY": "registry.example/", "TWINE_REPOSITORY_URL": "https://index.example/"}
    assert "--no-images is for dry runs" in refusal("--no-images", **away)
    assert "--fast is no flag" in refusal("--fast")
