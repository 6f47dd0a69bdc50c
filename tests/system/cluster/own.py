"""Releases with values of their own: names, recipe, a Redis with a password and an S3 server that no release brings;
two side by side in one namespace, and searchers alone in another.

    alpha   its own name, recipe and keys; bundled Redis and object store
    beta    its own names, recipe, tokens, keys and prefix of the store; Redis and object store of the company
    more    searchers alone, for alpha's run, in another namespace, with the searchers' token and keys that only read
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from pathlib import Path
from typing import Any

from tests.system.cluster.kube import get, minutes, run, until
from tests.system.cluster.release import CHART, Release

HERE = Path(__file__).parent
SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}}
REPLACED = {
    "name = .*": 'name = "{name}"',
    "seed = 0": "seed = {seed}",
    "checkpoint_interval = .*": "checkpoint_interval = 10",
    "num_steps = .*": "num_steps = 100000",
    "max_train_s = .*": "max_train_s = 100000",
    "prompts_per_batch = .*": "prompts_per_batch = 16",
    "group_size = .*": "group_size = 4",
    "rollouts_per_visit = .*": "rollouts_per_visit = 4",
}


def recipe(name: str, seed: int, **settings: str) -> str:
    """The quickstart's, changed into one of our own; `settings` replace lines of it."""
    text = (CHART / "files/recipes/quickstart.toml").read_text()
    for pattern, line in REPLACED.items():
        text, count = re.subn(rf"(?m)^{pattern}$", line.format(name=name, seed=seed), text, count=1)
        assert count == 1, f"the quickstart's recipe has no line {pattern}"
    for key, value in settings.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text, count=1)
        assert count == 1, f"the quickstart's recipe has no {key}"
    return text


def values_file(folder: Path, name: str, values: dict[str, Any]) -> Path:
    """A file for `helm --values`; JSON is YAML."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(values))
    return path


def small() -> dict[str, Any]:
    """Return the values that let a release fit beside the others on a small node."""
    return {
        part: {"resources": SMALL} | ({"shm": {"sizeLimit": ""}} if part in ("searcher", "trainer") else {})
        for part in ("buffer", "reward", "searcher", "trainer", "setup")
    }


def alpha(folder: Path, namespace: str, sets: list[str], **settings: str) -> Release:
    """With what the chart brings, under names of our own."""
    values = small() | {
        "recipe": recipe("first", 1, **settings),
        "fullnameOverride": "lab-alpha",
        "commonLabels": {"team": "rl"},
        "objectstore": {"enabled": True, "persistence": {"size": "2Gi"}},
        "store": {"credentialsSecret": "tba-store", "readOnlyCredentialsSecret": "tba-store-read"},
        "redis": {"auth": {"existingSecret": "tba-redis"}, "persistence": {"size": "2Gi"}, "maxmemory": "256mb"},
        "buffer": {"resources": SMALL, "extraEnv": [{"name": "TBA_BUFFER__MAX_BYTES", "value": "134217728"}]},
        "scaling": {"maxSearchers": 4},
        "networkPolicy": {"searchersFrom": [{"namespaceSelector": {}}]},
    }
    values["searcher"] |= {"replicas": 1}
    return Release("alpha", namespace, [values_file(folder, "alpha", values)], sets)


def beta(folder: Path, namespace: str, sets: list[str], file: str = "beta", **settings: str) -> Release:
    """With nothing but the services themselves."""
    values = small() | {
        "recipe": recipe("second", 2, **settings),
        "fullnameOverride": "lab-beta-of-the-company",
        "auth": {"existingSecret": "beta-tokens"},
        "store": {
            "url": "s3://company-bucket/deep/prefix",
            "endpointUrl": f"http://company-s3.{namespace}:80",
            "region": "eu-west-1",
            "credentialsSecret": "company-s3-write",
            "readOnlyCredentialsSecret": "company-s3-read",
        },
        "redis": {"enabled": False, "external": {"urlSecret": "company-redis", "port": 7000}},
        "scaling": {"backend": "none"},
    }
    values["searcher"] |= {"replicas": 1}
    values["setup"] |= {"createBucket": True}
    return Release("beta", namespace, [values_file(folder, file, values)], sets)


def more(folder: Path, namespace: str, run_of: Release, sets: list[str]) -> Release:
    """Searchers alone, for the run of a release in another namespace."""
    values: dict[str, Any] = {
        "recipe": recipe("first", 1),
        "searchersOnly": {
            "bufferUrl": f"http://lab-alpha-buffer.{run_of.namespace}:8700",
            "rewardUrl": f"http://lab-alpha-reward.{run_of.namespace}:8701",
        },
        "auth": {"existingSecret": "from-the-run"},
        "store": {
            "endpointUrl": f"http://lab-alpha-objectstore.{run_of.namespace}:9000",
            "readOnlyCredentialsSecret": "store-to-read",
        },
        "searcher": {"replicas": 1, "resources": SMALL, "shm": {"sizeLimit": ""}},
    }
    files = [CHART / "values-searchers.yaml", values_file(folder, "more", values)]
    return Release("more", namespace, files, sets)


def make_outside(release: Release) -> None:
    """A company's own Redis and S3 server with their Secrets, and beta's tokens, beside the parts of a release."""
    redis, store = (next(x for x in release.images() if name in x) for name in ("redis", "objectstore"))
    word = {name: secrets.token_hex(16) for name in ("redis", "write", "read")}
    url = f"redis://:{word['redis']}@company-redis.{release.namespace}:7000/3"
    make_secret(release.namespace, "company-redis", {"password": word["redis"], "redis-url": url})
    for kind in ("write", "read"):
        make_secret(
            release.namespace,
            f"company-s3-{kind}",
            {"AWS_ACCESS_KEY_ID": f"company-{kind}", "AWS_SECRET_ACCESS_KEY": word[kind]},
        )
    make_secret(release.namespace, "beta-tokens", secret_of(release.namespace, "tba-tokens"))
    text = (HERE / "outside.yaml").read_text().replace("REDIS_IMAGE", redis).replace("STORE_IMAGE", store)
    run("kubectl", "-n", release.namespace, "apply", "-f", "-", stdin=text)
    for name in ("company-redis", "company-s3"):
        run("kubectl", "-n", release.namespace, "rollout", "status", f"deployment/{name}", f"--timeout={minutes(2)}")


def make_place_for_searchers(namespace: str, run_of: Release) -> None:
    """A namespace that knows a searcher's token and keys that only read, and nothing else of the run."""
    run("kubectl", "create", "namespace", namespace)
    token = secret_of(run_of.namespace, "tba-tokens")["searcher.json"]
    make_secret(namespace, "from-the-run", {"searcher.json": token})
    make_secret(namespace, "store-to-read", secret_of(run_of.namespace, "tba-store-read"))


def secret_of(namespace: str, name: str) -> dict[str, str]:
    """Return the content of a Secret."""
    return {key: base64.b64decode(value).decode() for key, value in get(namespace, "secret", name)["data"].items()}


def make_secret(namespace: str, name: str, data: dict[str, str]) -> None:
    """A Secret with these texts."""
    metadata = {"name": name, "namespace": namespace}
    document = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}
    run("kubectl", "apply", "-f", "-", stdin=json.dumps(document))


def delete_outside(namespaces: list[str]) -> None:
    """The namespaces with all that is in them.

    Raises:
        StageError: one is still there.
    """
    for namespace in namespaces:
        run("kubectl", "delete", "namespace", namespace, "--wait=false", check=False)
    for namespace in namespaces:
        until(f"namespace {namespace} is gone", lambda n=namespace: is_gone(n), deadline_s=300)


def is_gone(namespace: str) -> bool:
    """Return True if there is no such namespace."""
    return run("kubectl", "get", "namespace", namespace, check=False).returncode != 0
