"""docker-compose.yml, for GPUs and with deploy/cpu.env: real settings, pinned GPUs, hardened services, secrets."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import tba
from tba.config import load_recipe
from tba.tokens import is_digest, load_role_tokens, token_digest
from tba_cli.doctor.checks import CHECKS
from tba_cli.parser import parse_arguments
from tba_cli.redis_server import START_SCRIPT
from tests.support.secrets_seen import (
    SEEN,
    Seen,
    access_key_id,
    make_secrets,
    secrets_of_kubernetes,
    store_seen,
    tokens_seen,
)

ROOT = Path(__file__).parents[3]
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:?)-([^}]*))?\}")


def interpolated(text: str, environ: dict[str, str]) -> str:
    """Interpolate `${NAME}`, `${NAME-default}` and `${NAME:-default}` as Compose does."""

    def value(found: re.Match[str]) -> str:
        given = environ.get(found[1])
        return given if given or (given is not None and not found[2]) else found[3] or ""

    return _VARIABLE.sub(value, text)


def compose(environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The Compose file with these variables."""
    return yaml.safe_load(interpolated((ROOT / "docker-compose.yml").read_text(), environ or {}))


def variables(name: str) -> dict[str, str]:
    """A file for `docker compose --env-file`."""
    lines = (ROOT / "deploy" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def environment(service: dict[str, Any]) -> dict[str, str]:
    """The TBA_SECTION__KEY values of a service, but for those that come from the shell."""
    given = {key: value for key, value in service.get("environment", {}).items() if value is not None}
    return {key: str(value) for key, value in given.items() if re.match(r"TBA_\w+__\w+$", key)}


CPU_FILE = variables("cpu.env")
GPU, CPU = compose(), compose(CPU_FILE)
SERVICES = sorted(GPU["services"])
OURS = sorted(name for name, service in GPU["services"].items() if environment(service))
SEARCHERS = ["searcher-1", "searcher-2", "searcher-3"]
CPU_SEARCHERS = ["searcher-cpu-1", "searcher-cpu-2"]
ALL_SEARCHERS = [*SEARCHERS, *CPU_SEARCHERS, "searcher-server"]


def started(made: dict[str, Any], profile: str) -> set[str]:
    """Services that `--profile PROFILE` starts."""
    return {name for name, service in made["services"].items() if profile in service.get("profiles", [profile])}


COMMON = {"redis", "objectstore", "setup-models", "setup-prompts", "buffer", "reward"}


def test_a_profile_has_the_services_of_a_run():
    assert started(GPU, "gpu") == {*COMMON, "trainer", *SEARCHERS}
    assert started(CPU, CPU_FILE["COMPOSE_PROFILES"]) == {*COMMON, "trainer-cpu", *CPU_SEARCHERS}
    assert started(GPU, "server") == {*COMMON, "trainer", "searcher-server"}
    assert started(GPU, "none") == COMMON, "nothing else begins by itself"


@pytest.mark.parametrize("name", OURS)
def test_its_environment_is_made_of_real_keys(name: str):
    recipe_name = Path(CPU_FILE["TBA_RECIPE"]).stem if "cpu" in name else "gsm8k"
    environ = environment(GPU["services"][name])
    if name == "searcher-server":
        environ["TBA_SEARCHER__OPENAI__URL"] = "http://vllm:8000"
    recipe = load_recipe(ROOT / f"recipes/{recipe_name}.toml", environ=environ)
    assert recipe.buffer_url == "http://buffer:8700"
    assert recipe.reward_url == "http://reward:8701"
    assert (recipe.buffer.port, recipe.reward.port) == (8700, 8701)
    assert recipe.store.endpoint_url == "http://objectstore:9000"
    assert recipe.searcher.on_run_end == "wait"


def test_each_gpu_has_one_user_as_in_the_paper():
    devices = {}
    for name, service in GPU["services"].items():
        for device in service["deploy"]["resources"].get("reservations", {}).get("devices", []):
            assert "count" not in device
            devices[name] = device["device_ids"]
            assert device["capabilities"] == ["gpu"]
    assert devices == {"trainer": ["0"], "searcher-1": ["1"], "searcher-2": ["2"], "searcher-3": ["3"]}
    assert load_recipe(ROOT / "recipes/gsm8k.toml", environ={}).searcher.num_searchers == len(SEARCHERS)


def test_a_searcher_that_samples_in_a_server_has_no_gpu():
    service = compose({"TBA_OPENAI_WEIGHTS": "/srv/weights"})["services"]["searcher-server"]
    assert "reservations" not in service["deploy"]["resources"]
    assert service["environment"]["TBA_SEARCHER__OPENAI__URL"] is None, "it comes from the shell"
    environ = {**environment(service), "TBA_SEARCHER__OPENAI__URL": "http://vllm:8000"}
    section = load_recipe(ROOT / "recipes/gsm8k.toml", environ=environ).searcher
    assert (section.engine, section.openai.url) == ("openai", "http://vllm:8000")
    assert f"/srv/weights:{section.openai.weights_folder}" in service["volumes"]


def checked(service: dict[str, Any], environ: dict[str, str]) -> list[str]:
    """Return the commands that a container starts, in order: doctor with its flags, then the service."""
    shell, flag, script, name = service["entrypoint"]
    assert (shell, flag, name) == ("sh", "-c", "checked")
    script = f'tba() {{ echo "tba $*"; return "$FAILS"; }}; {script.replace("$$", "$")}'
    command = [shell, flag, script, name, "echo", *service["command"]]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("name", ["setup-models", "trainer", "trainer-cpu", *ALL_SEARCHERS])
def test_doctor_looks_at_a_container_before_it_loads_anything(name: str):
    service = GPU["services"][name]
    words = service["environment"]["DOCTOR"].split()
    has_card = "reservations" in service["deploy"]["resources"]
    wanted = ["--check", "gpu", "--gpus", "1"] if has_card else []
    assert words == [*wanted, "--check", "disk"]
    parse_arguments(["doctor", "--config", "x.toml", *words])
    assert {words[i + 1] for i, word in enumerate(words) if word == "--check"} <= CHECKS.keys()
    doctor = f"tba doctor --config /etc/tba/recipe.toml {' '.join(words)}"
    environ = {"DOCTOR": " ".join(words)}
    assert checked(service, environ | {"FAILS": "1"}) == [doctor]
    assert checked(service, environ | {"FAILS": "0"}) == [doctor, " ".join(service["command"])]


def test_what_the_gpu_services_start_is_what_their_images_start():
    for name, folder in (("trainer", "trainer"), ("searcher-1", "searcher")):
        lines = (ROOT / f"services/{folder}/Dockerfile").read_text().splitlines()
        found = {line.split(" ", 1)[0]: json.loads(line.split(" ", 1)[1]) for line in lines
                 if line.startswith(("ENTRYPOINT", "CMD"))}  # fmt: skip
        assert GPU["services"][name]["command"] == found["ENTRYPOINT"] + found["CMD"]


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


def test_a_rehearsal_is_the_same_file_with_the_simulated_engine():
    """TBA_SEARCHER__ENGINE=simulated docker compose up: a name without a value comes from the shell."""
    for name in started(GPU, "gpu") & {*OURS}:
        assert GPU["services"][name]["environment"]["TBA_SEARCHER__ENGINE"] is None
        environ = environment(GPU["services"][name])
        assert "TBA_SEARCHER__ENGINE" not in environ
        recipe = load_recipe(ROOT / "recipes/gsm8k.toml", environ={**environ, "TBA_SEARCHER__ENGINE": "simulated"})
        assert (recipe.searcher.engine, recipe.trainer.device) == ("simulated", "cuda")
        assert load_recipe(ROOT / "recipes/gsm8k.toml", environ=environ).searcher.engine == "vllm"


def test_without_a_gpu_none_is_needed_and_there_are_at_least_the_searchers_of_the_recipe():
    for name in started(CPU, "cpu"):
        service = CPU["services"][name]
        assert "reservations" not in service["deploy"]["resources"]
        assert not service["image"].endswith("-gpu")
    assert load_recipe(ROOT / CPU_FILE["TBA_RECIPE"], environ={}).searcher.num_searchers <= len(CPU_SEARCHERS)
    assert all(GPU["services"][name]["image"].endswith("-gpu") for name in ("trainer", "setup-models", *SEARCHERS))


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
                ("_FILE", "_PATH", "_ENV")
            ), f"{name}: {key}"


def test_redis_keeps_what_the_buffer_demands_and_only_the_buffer_reaches_it():
    command = GPU["services"]["redis"]["command"][-1]
    for words in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction", "requirepass"):
        assert words in command
    # a command that a crash left half written is cut off first, at every start of the container
    assert "exec sh /usr/local/bin/start_redis.sh redis-server /tmp/redis.conf" in command
    (script,) = (volume.split(":")[0] for volume in GPU["services"]["redis"]["volumes"] if "start_redis" in volume)
    assert (ROOT / script) == START_SCRIPT
    assert GPU["networks"]["redis"]["internal"] is True
    inside = {name for name, service in GPU["services"].items() if "redis" in service.get("networks", [])}
    assert inside == {"redis", "buffer"}


@pytest.mark.parametrize("made", [GPU, CPU], ids=["gpu", "cpu"])
def test_redis_refuses_writes_before_the_kernel_kills_it(made: dict[str, Any]):
    redis = made["services"]["redis"]
    assert "--maxmemory $$MAXMEMORY" in redis["command"][-1]
    units = {"m": 1, "g": 1024}
    limit, bound = redis["deploy"]["resources"]["limits"]["memory"], redis["environment"]["MAXMEMORY"].removesuffix("b")
    room_mib = int(bound[:-1]) * units[bound[-1]]
    assert room_mib <= int(limit[:-1]) * units[limit[-1]] / 2
    if made is CPU:
        assert 1.4 * int(CPU_FILE["TBA_BUFFER__MAX_BYTES"]) <= room_mib * 2**20


def test_every_mounted_file_is_there():
    for service in GPU["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source


def in_folder(secret: dict[str, str]) -> str:
    """Return the path of a secret in the folder of deploy/make-secrets."""
    return secret["file"].removeprefix("./secrets/")


def test_make_secrets_makes_what_compose_mounts_once(tmp_path: Path):
    folder = tmp_path / "secrets"
    make_secrets(folder)
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert files.keys() == {in_folder(secret) for secret in GPU["secrets"].values()} | {"tokens/viewer.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o644}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "tokens")] == [0o700] * 2
    before = {name: path.read_text() for name, path in files.items()}
    make_secrets(folder)
    assert {name: path.read_text() for name, path in files.items()} == before
    other = tmp_path / "other"
    make_secrets(other)
    ours, theirs = ({path.read_text() for path in place.rglob("*") if path.is_file()} for place in (folder, other))
    assert ours & theirs == {"\n"}, "only hf_token is the same everywhere"


def test_services_know_the_tokens_that_the_roles_have(tmp_path: Path):
    tokens = tmp_path / "secrets" / "tokens"
    make_secrets(tmp_path / "secrets")
    roles = ("searcher", "trainer", "operator", "viewer")
    sent = {role: load_role_tokens(tokens / f"{role}.json")[role] for role in roles}
    assert not any(is_digest(token) for several in sent.values() for token in several)
    digests = {role: (token_digest(several[0]),) for role, several in sent.items()}
    assert load_role_tokens(tokens / "reward.json") == digests
    assert load_role_tokens(tokens / "buffer.json") == {**digests, "searcher": sent["searcher"]}
    # a token is changed: two for a while, in the files of the services too, which keep their inodes
    inode, new = (tokens / "buffer.json").stat().st_ino, "a-new-token-0123456789"
    (tokens / "searcher.json").write_text(json.dumps({"searcher": [new, *sent["searcher"]]}))
    make_secrets(tmp_path / "secrets")
    assert load_role_tokens(tokens / "buffer.json")["searcher"] == (new, *sent["searcher"])
    assert load_role_tokens(tokens / "reward.json")["searcher"] == (token_digest(new), *digests["searcher"])
    assert (tokens / "buffer.json").stat().st_ino == inode


def test_the_secrets_of_kubernetes_are_those_of_compose(tmp_path: Path):
    folder = tmp_path / "secrets"
    made = secrets_of_kubernetes(folder)
    assert made["tba-tokens"] == {path.name: path.read_text() for path in (folder / "tokens").iterdir()}
    assert made["tba-redis"]["redis-password"] == (folder / "redis_password").read_text().strip()
    assert made["tba-store"]["AWS_SECRET_ACCESS_KEY"] in (folder / "s3_credentials").read_text()
    assert made["tba-store-read"]["AWS_SECRET_ACCESS_KEY"] in (folder / "s3_credentials_readonly").read_text()
    assert secrets_of_kubernetes(folder) == made
    assert "tba-hub" not in made
    (folder / "hf_token").write_text("hf_abc\n")
    assert secrets_of_kubernetes(folder)["tba-hub"] == {"token": "hf_abc"}


OTHER = {
    "redis_password": "password of Redis",
    "hf_token": "token of the hub",
    "grafana_password": "password of Grafana",
}


def test_every_service_sees_its_own_secrets_alone(tmp_path: Path):
    """The table is the one of docs/security.md."""
    folder = tmp_path / "secrets"
    make_secrets(folder)
    named = {name: folder / in_folder(secret) for name, secret in GPU["secrets"].items()}
    for name, service in GPU["services"].items():
        given = service.get("secrets", [])
        sources = [secret["source"] if isinstance(secret, dict) else secret for secret in given]
        targets = [secret["target"] if isinstance(secret, dict) else secret for secret in given]
        mounted = [named[source] for source in sources]
        sends, checks = tokens_seen([path for path in mounted if path.parent.name == "tokens"])
        keys = {access_key_id(path) for path in mounted if path.name.startswith("s3_credentials")}
        others = [OTHER[source] for source in sources if source in OTHER]
        found = Seen(sends, checks, store_seen(keys), *others)
        kind = "searcher" if name.startswith("searcher-") else name.removesuffix("-cpu")
        assert found == SEEN.get(kind, Seen()), name
        # the files that the environment names are mounted, and the folder with all of them is not
        asked = {key: value for key, value in service.get("environment", {}).items() if "/run/secrets/" in str(value)}
        if checks or sends:
            assert Path(asked["TBA_AUTH__TOKENS_FILE"]).name in targets
        if found.store in ("read", "write"):
            assert Path(asked["AWS_SHARED_CREDENTIALS_FILE"]).name in targets
        assert not any("secrets" in str(volume) for volume in service.get("volumes", []))


@pytest.mark.parametrize("file", [None, "cpu.env"])
def test_compose_reads_the_file_as_these_tests_do(file: str | None):
    """The other tests look at the file itself: here Compose interpolates, merges and checks it."""
    version = ["docker", "compose", "version"]
    if not shutil.which("docker") or subprocess.run(version, capture_output=True).returncode != 0:
        pytest.skip("docker compose is not on PATH")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TBA_", "COMPOSE_"))}
    words = [] if file is None else ["--env-file", f"deploy/{file}"]

    def read(*flags: str) -> dict[str, Any]:
        command = ["docker", "compose", *words, *flags, "config", "--no-path-resolution", "--format", "json"]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, check=True)
        return json.loads(answer.stdout)["services"]

    made, given = read("--profile", "*"), GPU if file is None else CPU
    assert made.keys() == set(SERVICES)
    shell = CPU_FILE if file else {}
    for name, service in made.items():
        own = given["services"][name]
        wanted = {k: shell.get(k) if v is None else str(v) for k, v in own.get("environment", {}).items()}
        assert (service.get("environment") or {}) == wanted
        reserved = [each["deploy"]["resources"].get("reservations", {}).get("devices", []) for each in (service, own)]
        made_ids, own_ids = ([device["device_ids"] for device in devices] for devices in reserved)
        assert made_ids == own_ids
        assert [service.get(key) for key in ("image", "command", "entrypoint")] == [
            own.get(key) for key in ("image", "command", "entrypoint")
        ]
    assert read().keys() == (COMMON if file is None else started(CPU, "cpu")), "the file chooses the profile"
