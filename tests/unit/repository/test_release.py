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
    files = set(re.findall(r"(?:tools|deploy)/[\w/-]+\.(?:py|txt)", text))
    assert len(files) > 2
    assert {name for name in files if not (ROOT / name).is_file()} == set()


def release(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "deploy" / "release", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent), "REGISTRY": "", **environ},
    )


def checkout(folder: Path) -> None:
    """A repository of nothing but the script, tagged as a release."""
    for name in ("deploy", "tba"):
        (folder / name).mkdir()
    (folder / "deploy" / "release").write_bytes((ROOT / "deploy" / "release").read_bytes())
    (folder / "deploy" / "release").chmod(0o755)
    (folder / "tba" / "__init__.py").write_text(f'__version__ = "{tba.__version__}"\n')
    (folder / "CHANGELOG.md").write_text(f"## [{tba.__version__}] - today\n")
    (folder / ".gitignore").write_text("dist\nbuild\nwheels\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "all")
    git(folder, "tag", f"v{tba.__version__}")


def git(folder: Path, *words: str) -> None:
    flags = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *flags, *words], cwd=folder, check=True, capture_output=True)


def test_a_release_is_refused_where_anything_would_be_missing(tmp_path: Path) -> None:
    checkout(tmp_path)

    def refusal(*words: str, **environ: str) -> str:
        done = release(tmp_path, *words, **environ)
        assert done.returncode == 2, done.stderr
        return done.stderr

    git(tmp_path, "tag", "--delete", f"v{tba.__version__}")
    assert f"HEAD has no tag v{tba.__version__}" in refusal()
    git(tmp_path, "tag", f"v{tba.__version__}")
    (tmp_path / "CHANGELOG.md").write_text("")
    assert "not committed" in refusal()
    git(tmp_path, "commit", "-am", "more")
    git(tmp_path, "tag", "--force", f"v{tba.__version__}")
    assert "CHANGELOG.md has no section" in refusal()
    git(tmp_path, "reset", "--hard", "HEAD^")
    git(tmp_path, "tag", "--force", f"v{tba.__version__}")
    assert "REGISTRY is not set" in refusal()
    assert "TWINE_REPOSITORY_URL is not set" in refusal(REGISTRY="registry.example/")
    away = {"REGISTRY": "registry.example/", "TWINE_REPOSITORY_URL": "https://index.example/"}
    assert "--no-images is for dry runs" in refusal("--no-images", **away)
    assert "--fast is no flag" in refusal("--fast")
    (tmp_path / "deploy" / "wheels").mkdir()
    (tmp_path / "deploy" / "wheels" / "torch-2+cpu-x.whl").touch()
    assert "deploy/wheels has a CPU build of torch" in refusal(GPU_IMAGES="1", **away)
