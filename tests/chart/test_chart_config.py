"""The recipe and the environment of every container are parsed by the real models, and mean what the values said."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

from tba.config import Recipe, load_recipe
from tests.support.chart import BARE, EXTERNAL, NODES, QUICKSTART, Pod, each_file, environment, needs_helm, render_file

pytestmark = needs_helm
OF_TBA = {"buffer", "reward", "searcher", "trainer", "setup"}
SECRETS = {"TBA_BUFFER__REDIS_URL": "rediss://:secret@redis.example:6380/0"}
"""The content of a Secret."""


def recipe_text(path: Path, *more: str) -> str:
    return render_file(path, *more).one("ConfigMap", "t-recipe")["data"]["recipe.toml"]


def recipe_of(path: Path, component: str, folder: Path, *more: str) -> Recipe:
    file = folder / "recipe.toml"
    file.write_text(recipe_text(path, *more))
    pod = render_file(path, *more).pod(component)
    return load_recipe(file, environ=environment(pod, SECRETS))


def test_searchers_alone_share_a_cache_of_weights(tmp_path: Path) -> None:
    store = recipe_of(NODES, "searcher", tmp_path).store
    assert (store.cache_folder, store.cache_bytes) == ("/weight-cache", 200_000_000_000)
    spec = render_file(NODES).pod("searcher").spec
    assert {"name": "weight-cache", "persistentVolumeClaim": {"claimName": "weights"}} in spec["volumes"]
    assert {"name": "weight-cache", "mountPath": "/weight-cache"} in spec["containers"][0]["volumeMounts"]
    assert recipe_of(NODES, "trainer", tmp_path).store.cache_folder is None
    assert recipe_of(BARE, "searcher", tmp_path).store.cache_folder is None


@each_file()
def test_every_container_reads_a_recipe(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(recipe_text(path))
    read = Counter()
    for pod in render_file(path).pods():
        if pod.component in OF_TBA:
            for container in pod.containers:
                recipe = load_recipe(file, environ=environment(pod, SECRETS, container=container))
                assert recipe.run.name == tomllib.loads(file.read_text())["run"]["name"]
                assert recipe.store.url.startswith("s3://")
                read[pod.component] += 1
    assert OF_TBA - {"setup"} <= read.keys()


def test_values_of_the_user_come_before_those_of_the_chart(tmp_path: Path) -> None:
    made = render_file(EXTERNAL)
    assert recipe_of(EXTERNAL, "buffer", tmp_path).buffer.lease_s == 90
    assert environment(made.pod("trainer"))["HTTPS_PROXY"] == "http://proxy:3128"
    assert environment(made.pod("searcher"))["HTTPS_PROXY"] == "http://other:3128"
    again = recipe_of(
        QUICKSTART, "buffer", tmp_path, "--set-string", "extraEnv[0].name=TBA_BUFFER__PORT,extraEnv[0].value=9"
    )
    assert again.buffer.port == 9


def test_tls_is_on_everywhere_or_nowhere(tmp_path: Path) -> None:
    for component in sorted(OF_TBA):
        recipe = recipe_of(EXTERNAL, component, tmp_path)
        assert recipe.buffer_url == "https://t-buffer:8700"
        assert recipe.reward_url == "https://t-reward:8701"
        assert mounted(render_file(EXTERNAL).pod(component), str(recipe.tls.ca_file))
        assert mounted(render_file(EXTERNAL).pod(component), str(recipe.store.ca_file))
        assert (recipe.tls.cert_file is not None) == (component in {"buffer", "reward"})
    assert recipe_of(QUICKSTART, "buffer", tmp_path).tls.ca_file is None


def test_redis_with_password_and_tls(tmp_path: Path) -> None:
    buffer = recipe_of(NODES, "buffer", tmp_path)
    assert buffer.buffer.redis_url == "rediss://t-redis:6379/0"
    pod = render_file(NODES).pod("buffer")
    assert mounted(pod, str(buffer.buffer.redis_password_file))
    assert mounted(pod, str(buffer.tls.ca_file))
    assert not mounted(render_file(NODES).pod("searcher"), "/etc/tba-redis/redis-password")


def test_only_the_buffer_may_scale(tmp_path: Path) -> None:
    recipe = recipe_of(QUICKSTART, "buffer", tmp_path)
    assert recipe.scaling.backend == "kubernetes"
    assert recipe.scaling.deployment == render_file(QUICKSTART).pod("searcher").name
    assert recipe.scaling.max_searchers == 8
    for path in (EXTERNAL, BARE):
        assert recipe_of(path, "buffer", tmp_path).scaling.backend == "none"
        # said outright: a recipe that names a backend would have the buffer ask an API that it may not use
        assert environment(render_file(path).pod("buffer"))["TBA_SCALING__BACKEND"] == "none"


@each_file()
def test_files_that_the_environment_names_are_mounted(path: Path, tmp_path: Path) -> None:
    for pod in render_file(path).pods():
        if pod.component not in OF_TBA:
            continue
        recipe = recipe_of(path, pod.component, tmp_path)
        wanted = [recipe.auth.tokens_file, recipe.tls.ca_file, recipe.tls.cert_file, recipe.tls.key_file]
        wanted += [recipe.store.ca_file, recipe.tracking.metrics_path, "/etc/tba/recipe.toml"]
        if pod.component == "buffer":
            wanted.append(recipe.buffer.redis_password_file)
        assert [str(file) for file in wanted if file is not None and not mounted(pod, str(file))] == []


@each_file()
def test_no_secret_is_in_an_environment_or_a_config_map(path: Path) -> None:
    made = render_file(path)
    assert made.of("Secret") == []
    for pod in made.pods():
        for container in pod.containers:
            for entry in container.get("env", []):
                secret = (
                    any(word in entry["name"] for word in ("SECRET", "PASSWORD", "TOKEN"))
                    and "FILE" not in entry["name"]
                )
                assert not (secret and "value" in entry), entry


def mounted(pod: Pod, file: str) -> bool:
    """Return True if a file lies in one of the container's volumes, under a name that the volume gives it."""
    container = pod.spec["containers"][0]
    found = [mount for mount in container["volumeMounts"] if file.startswith(mount["mountPath"].rstrip("/") + "/")]
    if not found:
        return False
    rest = file.removeprefix(found[0]["mountPath"].rstrip("/") + "/")
    volume = next(volume for volume in pod.spec["volumes"] if volume["name"] == found[0]["name"])
    items = volume.get("secret", {}).get("items")
    return items is None or rest in {item["path"] for item in items}


@each_file(EXTERNAL)
def test_redis_has_room_for_what_the_buffer_keeps(path: Path, tmp_path: Path) -> None:
    args = render_file(path).pod("redis").spec["containers"][0]["args"]
    bound = int(args[args.index("--maxmemory") + 1].removesuffix("mb")) * 2**20
    assert bound >= 1.3 * recipe_of(path, "buffer", tmp_path).buffer.max_bytes
