"""What is installed without the clone: the wheels, their versions and their lower bounds."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

import tba
from tba_cli.main import main
from tba_cli.parser import parse_arguments
from tba_cli.shipped_recipes import recipe_path, shipped_recipes

ROOT = Path(__file__).parents[3]
FOLDERS = (".", "services/buffer", "services/reward", "services/searcher", "services/trainer")


def project(folder: str) -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def requirements(folder: str) -> list[str]:
    found = project(folder)
    return [*found["dependencies"], *(line for extra in found["optional-dependencies"].values() for line in extra)]


# ---- What is in the wheels ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name of a package -> the files in its wheel."""
    out = tmp_path_factory.mktemp("wheels")
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    command = [sys.executable, "-m", "pip", "wheel", *flags, ".", "./services/buffer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {path.name.split("-")[0]: set(ZipFile(path).namelist()) for path in out.glob("*.whl")}


def files(folder: str, pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT / folder)) for path in (ROOT / folder).glob(pattern) if path.is_file()}


@pytest.mark.nightly
def test_the_wheel_of_tba_holds_the_recipes_and_only_packages(wheels: dict[str, set[str]]) -> None:
    found = wheels["tba_rl"]
    recipes = {f"tba_cli/{path}" for path in files(".", "recipes/*.toml")}
    assert "tba_cli/recipes/quickstart.toml" in recipes
    assert {"tba/py.typed", "tba_cli/py.typed", "tba_cli/start_redis.sh", *recipes} <= found
    assert {path.split("/")[0] for path in found} == {"tba", "tba_cli", f"tba_rl-{tba.__version__}.dist-info"}


@pytest.mark.nightly
def test_the_wheel_of_the_buffer_holds_page_and_scripts_and_only_its_package(wheels: dict[str, set[str]]) -> None:
    found = wheels["tba_buffer"]
    scripts = files("services/buffer", "tba_buffer/storage/lua/**/*.lua")
    page = files("services/buffer", "tba_buffer/page/static/**/*")
    assert len(scripts) > 20
    assert "tba_buffer/page/static/index.html" in page
    assert {"tba_buffer/py.typed", *scripts, *page} <= found
    assert {path.split("/")[0] for path in found} == {"tba_buffer", f"tba_buffer-{tba.__version__}.dist-info"}


# ---- Versions and bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_own_packages_are_required_in_this_version_and_others_with_a_lower_bound(folder: str) -> None:
    own = [line for line in requirements(folder) if line.startswith("tba-")]
    assert own
    for line in own:
        assert re.fullmatch(rf"tba-\w+(\[[\w-]+\])?=={re.escape(tba.__version__)}", line), line
    for line in set(requirements(folder)) - set(own):  # an upper bound: what was tried of vLLM
        assert re.fullmatch(r"[\w-]+(\[\w+\])?(>=[\w.]+(,<=[\w.]+)?|==[\w.]+)", line), line


def test_a_package_has_the_same_bound_everywhere_and_constraints_are_not_below_it() -> None:
    bounds: dict[str, set[str]] = {}
    for line in {line for folder in FOLDERS for line in requirements(folder)}:
        name, _, bound = re.sub(r"\[\w+\]", "", line).partition(">=")
        bounds.setdefault(normalised(name), set()).add(bound)
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}
    lines = [line for line in (ROOT / "deploy/constraints/main.txt").read_text().splitlines() if "==" in line]
    pins = {normalised(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert [name for name in pins.keys() & bounds.keys() if number(pins[name]) < number(min(bounds[name]))] == []


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_extras_of_tba_name_extras_that_the_services_have() -> None:
    extras = project(".")["optional-dependencies"]
    named = [found for lines in extras.values() for line in lines if (found := re.match(r"tba-(\w+)\[(\w+)\]", line))]
    assert len(named) > 5
    for found in named:
        assert found[2] in project(f"services/{found[1]}")["optional-dependencies"]
    services = {f"tba-{folder.partition('/')[2]}=={tba.__version__}" for folder in FOLDERS[1:]}
    assert services <= set(extras["local"])


# ---- Recipes by name ------------------------------------------------------------------------------------------------


def test_a_bare_name_is_a_shipped_recipe_unless_a_file_here_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(shipped_recipes()) == {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    assert Path(recipe_path("quickstart")).read_bytes() == (ROOT / "recipes/quickstart.toml").read_bytes()
    for word in ("nowhere.toml", "folder/quickstart", str(tmp_path / "own")):
        assert recipe_path(word) == word
    (tmp_path / "quickstart").touch()
    assert recipe_path("quickstart") == "quickstart"


def test_the_demo_is_the_quickstart_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from tba_cli.commands import run

    seen = []
    monkeypatch.setattr(run, "run_command", lambda args: seen.append(args) or 0)
    assert main(["demo", "--seed", "7", "--set", "trainer.num_steps=3"]) == 0
    words = "run quickstart --seed 7 --run-name quickstart-seed7 --fresh --set trainer.num_steps=3"
    expected = {**vars(parse_arguments(words.split())), "command": "tba_cli.commands.run:demo_command"}
    assert vars(seen[0]) == expected
