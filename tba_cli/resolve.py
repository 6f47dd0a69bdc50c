"""Turn a recipe as written into the recipe that the children read: real ports, absolute paths, this run's Redis."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from tba import plugins
from tba.config import Recipe, parse_recipe
from tba.config.data import with_replaced
from tba.config.searcher import ENGINES
from tba.errors import ConfigError, not_installed
from tba.model_folders import check_embedding_model, check_tokenizer
from tba.tls import address
from tba_cli.ports import PortRequest, choose_ports
from tba_cli.redis_server import redis_url
from tba_cli.run_folder import RunFolder

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Address to listen on -> address to which clients on this machine can connect."""
PATH_KEYS = (
    ("model", "path"),
    ("data", "path"),
    ("auth", "tokens_file"),
    ("tls", "cert_file"),
    ("tls", "key_file"),
    ("tls", "ca_file"),
    ("store", "ca_file"),
    ("eval", "embedding_model"),
)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, because a resume may happen in another current folder."""
    folders = [item.path for item in recipe.prepare]
    document = with_replaced(
        recipe.model_dump(mode="json"), {path: os.path.abspath(os.path.expanduser(path)) for path in folders}
    )
    for section in document["data"]["sets"]:
        # a value that is nothing here is a name on the hub
        if section["dataset"] is not None and os.path.exists(os.path.expanduser(section["dataset"])):
            section["dataset"] = os.path.abspath(os.path.expanduser(section["dataset"]))
    for name, key in PATH_KEYS:
        if document[name][key] is not None:
            document[name][key] = os.path.abspath(os.path.expanduser(document[name][key]))
    return parse_recipe(document, where="recipe")


def with_real_addresses(recipe: Recipe, folder: RunFolder) -> Recipe:
    """Return the recipe that the children read, with free ports and real addresses.

    A relative store, and the paths of metrics and TensorBoard, are resolved in the run folder. The Redis password is
    the folder's; so are the tokens, unless the recipe names a tokens file.
    """
    buffer_port, reward_port = choose_ports(
        [
            PortRequest("buffer.port", recipe.buffer.host, recipe.buffer.port),
            PortRequest("reward.port", recipe.reward.host, recipe.reward.port),
        ]
    )
    document = recipe.model_dump(mode="json")
    for name, port in (("buffer", buffer_port), ("reward", reward_port)):
        section = document[name]
        section["port"] = port
        host = section["host"]
        section["url"] = f"{recipe.tls.scheme}://{address(_WILDCARDS.get(host) or host, port)}"
    password_file = str(folder.redis_password_path)
    document["buffer"].update(redis_url=redis_url(folder.redis_socket_path), redis_password_file=password_file)
    if recipe.auth.tokens_file is None:
        document["auth"]["tokens_file"] = str(folder.tokens_path("all"))
    document["store"]["url"] = absolute_store_url(recipe.store.url, folder)
    document["scaling"]["backend"] = "local"
    # nothing starts searchers again here, and the end of the run waits for theirs
    document["searcher"]["on_run_end"] = "exit"
    tracking = document["tracking"]
    for key in ("metrics_path", "tensorboard_dir"):
        if tracking[key] is not None:
            tracking[key] = str(folder.path / os.path.expanduser(tracking[key]))
    return parse_recipe(document, where=str(folder.config_path))


def absolute_store_url(url: str, folder: RunFolder) -> str:
    """Return the URL of a store; a relative `file://` path is resolved in the run folder."""
    scheme, _, path = url.partition("://")
    if scheme != "file" or path.startswith("/"):
        return url
    return f"file://{folder.path / path}"


def check_model(recipe: Recipe) -> bool:
    """Return whether a warm start has to make the starting model first; ConfigError without model and warm start."""
    check_embedding_model(recipe.eval.embedding_model)
    folder = Path(recipe.model.path)
    if (folder / "config.json").is_file():
        check_tokenizer(folder)
        return False
    if recipe.model.warm_start is None:
        raise ConfigError(
            f"model.path {recipe.model.path} holds no config.json; give a folder in Hugging Face format, "
            "or add a [model.warm_start] section that says how to make one"
        )
    return True


def seed_warning(recipe: Recipe, report: bytes | None = None) -> str | None:
    """Return a warning if the starting model was made by a warm start with another seed than the run's, else None.

    Args:
        report: the content of the model's warmstart.json; None: read it from the model folder.
    """
    try:
        seed = json.loads(report or (Path(recipe.model.path) / "warmstart.json").read_bytes())["seed"]
    except (OSError, ValueError, TypeError, KeyError):  # a model that a person put there
        return None
    if recipe.model.warm_start is None or seed == recipe.run.seed:
        return None
    return (
        f"model.path {recipe.model.path} was made with run.seed = {seed}, not {recipe.run.seed}; it is taken as it is"
    )


def check_installed(recipe: Recipe) -> None:
    """Raise ConfigError if a package of an extra, or a module of an objective, engine, tracker or tool, is missing.

    No module is imported, because it may need torch. Prompt sources and scorers have their own checks.
    """
    preset, engine, section = recipe.objective.preset, recipe.searcher.engine, recipe.tracking
    asked = {
        "vllm": ('searcher.engine = "vllm"', engine == "vllm" and not recipe.is_offline),
        "wandb": ("[tracking.wandb]", section.wandb is not None),
        "tensorboard": ("tracking.tensorboard_dir", section.tensorboard_dir is not None),
    }
    lacking = {name: key for name, (key, is_asked) in asked.items() if is_asked and not importlib.util.find_spec(name)}
    if lacking:
        raise not_installed(" and ".join(lacking.values()), *lacking)
    if recipe.objective.is_custom:
        plugins.find_module(preset, what="objective.preset")
    if engine not in ENGINES:
        plugins.find_module(engine, what="searcher.engine")
    for name in section.trackers:
        plugins.find_module(name, what="tracking.trackers")
    for task, played in recipe.environments.items():
        if played.environment is not None and not played.is_remote:
            plugins.find_module(played.environment, what=f"environments.{task}.environment")
        for name in played.tools:
            plugins.find_module(name, what=f"environments.{task}.tools")
