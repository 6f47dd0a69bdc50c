"""docker-compose.yml and compose.cpu.yml: real settings, pinned GPUs, hardened services, secrets that exist."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

import tba
from tba.config import load_recipe
from tba.local.redis_server import START_SCRIPT
from tba.tokens import load_tokens
from tests.support.compose_files import ROOT, compose, environment

GPU, CPU = compose("docker-compose.yml"), compose("compose.cpu.yml")
SERVICES = sorted(GPU["services"])
OURS = sorted(name for name, service in GPU["services"].items() if environment(service))
SEARCHERS = ["searcher-1", "searcher-2", "searcher-3"]
GOLDEN = ROOT / "tests/data/compose"
GOLDEN_COMPOSE = "2.26."
"""Other versions of Compose write the same in other words."""


def test_the_services_of_a_run_are_there():
    assert {"buffer", "reward", "trainer", "setup-models", "setup-prompts", *SEARCHERS} == set(OURS)


@pytest.mark.parametrize("name", OURS)
def test_its_environment_is_made_of_real_keys(name: str):
    for extra, recipe_name in (({}, "gsm8k"), (CPU["services"][name]["environment"], "quickstart")):
        environ = environment(GPU["services"][name]) | environment({"environment": extra})
        recipe = load_recipe(ROOT / f"recipes/{recipe_name}.toml", environ=environ)
        assert recipe.buffer_url == "http://buffer:8700"
        assert recipe.reward_url == "http://reward:8701"
        assert (recipe.buffer.port, recipe.reward.port) == (8700, 8701)
        assert recipe.store.endpoint_url == "http://objectstore:9000"
        assert recipe.searcher.when_over == "wait"


def test_each_gpu_has_one_user_as_in_the_paper():
    devices = {}
    for name, service in GPU["services"].items():
        for device in service["deploy"]["resources"].get("reservations", {}).get("devices", []):
            assert "count" not in device
            devices[name] = device["device_ids"]
            assert device["capabilities"] == ["gpu"]
    assert devices == {"trainer": ["0"], "searcher-1": ["1"], "searcher-2": ["2"], "searcher-3": ["3"]}
    assert load_recipe(ROOT / "recipes/gsm8k.toml", environ={}).searcher.num_searchers == len(SEARCHERS)


def test_the_cpu_file_needs_no_gpu_and_has_the_searchers_of_the_recipe():
    with_gpu = {name for name, service in GPU["services"].items() if "reservations" in service["deploy"]["resources"]}
    for name in with_gpu:
        assert "reservations" not in CPU["services"][name]["deploy"]["resources"]
        assert not CPU["services"][name]["image"].endswith("-gpu")
    running = [name for name in SEARCHERS if "profiles" not in CPU["services"][name]]
    assert load_recipe(ROOT / "recipes/quickstart.toml", environ={}).searcher.num_searchers == len(running)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened_and_bounded(name: str):
    service = GPU["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert service["deploy"]["resources"]["limits"]["memory"]
    assert "restart" in service
    assert service.get("read_only") is True or name == "grafana"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "privileged" not in service
    assert not any("docker.sock" in str(volume) for volume in service.get("volumes", []))
    tag = service["image"].rpartition(":")[2]
    assert tag[0] in "v0123456789", service["image"]
    if service["image"].startswith("tba-"):
        assert tag.removesuffix("-gpu") == tba.__version__


def test_no_secret_is_an_environment_variable():
    for name, service in GPU["services"].items():
        for key in service.get("environment", {}):
            assert not any(word in key for word in ("ACCESS_KEY", "SECRET", "TOKEN")) or key.endswith(
                ("_FILE", "_PATH")
            ), f"{name}: {key}"


def test_start_order_is_by_health_and_completion():
    waits = {name: service.get("depends_on", {}) for name, service in GPU["services"].items()}
    assert all(isinstance(needed, dict) for needed in waits.values())
    assert waits["buffer"]["redis"] == {"condition": "service_healthy"}
    assert waits["trainer"]["setup-models"] == {"condition": "service_completed_successfully"}
    assert waits["searcher-1"]["reward"] == {"condition": "service_healthy"}
    for needed in waits.values():
        for other, how in needed.items():
            if how["condition"] == "service_completed_successfully":
                assert GPU["services"][other]["restart"] == "no"


def test_redis_keeps_what_the_buffer_demands_and_only_the_buffer_reaches_it():
    command = GPU["services"]["redis"]["command"][-1]
    for words in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction", "requirepass"):
        assert words in command
    # what a crash left written by half is cut off first, at every start of the container
    assert "exec sh /usr/local/bin/start_redis.sh redis-server /tmp/redis.conf" in command
    (script,) = (volume.split(":")[0] for volume in GPU["services"]["redis"]["volumes"] if "start_redis" in volume)
    assert (ROOT / script) == START_SCRIPT
    assert GPU["networks"]["redis"]["internal"] is True
    inside = {name for name, service in GPU["services"].items() if "redis" in service.get("networks", [])}
    assert inside == {"redis", "buffer", "chaos"}


@pytest.mark.parametrize("files", [("docker-compose.yml",), ("docker-compose.yml", "compose.cpu.yml")])
def test_redis_refuses_writes_before_the_kernel_kills_it(files: tuple[str, ...]):
    assert "--maxmemory $$MAXMEMORY" in GPU["services"]["redis"]["command"][-1]
    redis = {key: value for name in files for key, value in compose(name)["services"]["redis"].items()}
    units = {"m": 1, "g": 1024}
    limit, bound = redis["deploy"]["resources"]["limits"]["memory"], redis["environment"]["MAXMEMORY"].removesuffix("b")
    assert int(bound[:-1]) * units[bound[-1]] <= int(limit[:-1]) * units[limit[-1]] / 2


def test_compiled_kernels_are_cached_where_they_may_be_loaded():
    """A tmpfs of Docker is mounted noexec, and Triton's and vLLM's caches below HOME are shared libraries."""
    for name in OURS:
        service = GPU["services"][name]
        folders = {str(volume).split(":")[-1 if ":" not in str(volume) else 1] for volume in service["volumes"]}
        for key in ("HOME", "TMPDIR"):
            assert service["environment"][key] in folders, f"{name}: {key}"


def test_every_mounted_file_is_there():
    for service in GPU["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source


def test_make_secrets_makes_what_compose_mounts_once(tmp_path: Path):
    folder = tmp_path / "secrets"
    made = [subprocess.run([ROOT / "deploy/make-secrets", folder], check=True, capture_output=True, text=True).stdout]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    wanted = {Path(secret["file"]).name for secret in GPU["secrets"].values()}
    assert {path.name for path in folder.iterdir()} == wanted
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
    tokens = load_tokens(folder / "tokens.json")
    assert tokens is not None
    assert set(tokens) == {"searcher", "trainer", "operator", "viewer"}
    before = {path.name: path.read_text() for path in folder.iterdir()}
    made.append(
        subprocess.run([ROOT / "deploy/make-secrets", folder], check=True, capture_output=True, text=True).stdout
    )
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    assert made[0].count("made ") == made[1].count("kept ") == len(wanted)
    other = tmp_path / "other"
    subprocess.run([ROOT / "deploy/make-secrets", other], check=True, capture_output=True)
    assert (other / "tokens.json").read_text() != before["tokens.json"]


def test_the_chaos_addresses_are_those_of_its_links():
    lines = [line for line in (ROOT / "deploy/chaos/env").read_text().splitlines() if not line.startswith("#")]
    spoilt = compose("docker-compose.yml", dict(line.split("=", 1) for line in lines))
    recipe = load_recipe(ROOT / "recipes/gsm8k.toml", environ=environment(spoilt["services"]["buffer"]))
    addresses = [recipe.buffer_url, recipe.reward_url, recipe.store.endpoint_url, recipe.buffer.redis_url]
    targets = spoilt["services"]["chaos"]["command"]
    assert all(
        address and f"//chaos:{target.split(':')[1]}" in address
        for address, target in zip(addresses, targets, strict=True)
    )


@pytest.mark.parametrize("golden", ["gpu", "cpu"])
def test_what_compose_makes_of_it_is_golden(golden: str):
    """Written by: docker compose ... config --no-path-resolution > tests/data/compose/NAME.yaml"""
    if shutil.which("docker") is None:
        pytest.skip("docker is not on PATH")
    version = subprocess.run(["docker", "compose", "version", "--short"], capture_output=True, text=True).stdout.strip()
    if not version.startswith(GOLDEN_COMPOSE):
        pytest.skip(f"the golden files are of Compose {GOLDEN_COMPOSE}x, this is {version or 'none'}")
    files = ["-f", "docker-compose.yml", *(["-f", "compose.cpu.yml"] if golden == "cpu" else [])]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TBA_", "CHAOS_", "COMPOSE_"))}
    command = ["docker", "compose", *files, "--profile", "*", "config", "--no-path-resolution", "--format", "json"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, check=True)
    wanted = yaml.safe_load((GOLDEN / f"{golden}.yaml").read_text())
    assert json.loads(answer.stdout) == wanted
