"""Check that the models which the services of this machine read are whole, here or in the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tba.config.sections import check_tokenizer
from tba.errors import ConfigError, MalformedError, StoreError
from tba.store import open_store
from tba.weights import tensor_header
from tba_cli.artifacts import ArtifactStore, RequiredFolder, required_folders
from tba_cli.artifacts.artifact_store import describe
from tba_cli.artifacts.prepared import made_at_start
from tba_cli.artifacts.required import Service
from tba_cli.doctor.target import CheckResult, Target, fail, ok, warn

TIMEOUT_S = 5.0
INDEX = "model.safetensors.index.json"


def check_models(target: Target) -> Iterator[CheckResult]:
    """Check every folder that the recipe names for the services of this machine."""
    names: tuple[Service, ...] = ("reward", "searcher", "trainer")
    found = [folder for name in names if name in target.services for folder in required_folders(target.recipe, name)]
    if not found:
        yield ok("model", f"{', '.join(sorted(target.services))} needs no folder of this recipe")
    # several services may need one folder
    for folder in dict.fromkeys(found):
        yield _here(folder) if folder.is_here else _elsewhere(target, folder)


def _here(folder: RequiredFolder) -> CheckResult:
    path = Path(folder.path).expanduser()
    try:
        num_tensors, size_bytes = _check_whole(path)
        if folder.key == "model.path":
            check_tokenizer(path)
    except (ConfigError, StoreError, MalformedError) as error:
        return fail(
            "model",
            f"{folder.path} ({folder.key}): {error}",
            "remove the folder and fetch it again: tba data prepare RECIPE, or tba model pull",
        )
    return ok("model", f"{folder.path} ({folder.key}): {num_tensors} tensors, {size_bytes / 2**20:,.1f} MiB")


def _check_whole(path: Path) -> tuple[int, int]:
    """Return (number of tensors, bytes) of the weights, read from the headers of their files.

    Raises:
        ConfigError: something is missing.
        StoreError, MalformedError: a file is damaged.
    """
    if not (path / "config.json").is_file():
        raise ConfigError("it holds no config.json, so it is not a model in Hugging Face format")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError("it holds no *.safetensors")
    names = {name for file in files for name in tensor_header(file)}
    if (path / INDEX).is_file():
        try:
            wanted = set(json.loads((path / INDEX).read_bytes())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"its {INDEX} cannot be read ({error})") from None
        if wanted - names:
            raise ConfigError(f"{len(wanted - names)} tensors of its {INDEX} are in no file: {min(wanted - names)}")
    return len(names), sum(file.stat().st_size for file in files)


def _elsewhere(target: Target, folder: RequiredFolder) -> CheckResult:
    what, section = f"{folder.path} ({folder.key})", target.recipe.store
    has_maker = target.recipe.model.warm_start is not None and folder.key == "model.path"
    if target.is_local and has_maker:
        return ok("model", f"{what} is not there yet; `tba run` makes it")
    if target.is_local and folder.path in made_at_start(target.recipe):
        return ok("model", f"{what} is not there yet; `tba run` fetches or makes it")
    # a relative file:// store lies in a run folder, which does not exist yet
    if not section.url.startswith("file://") or section.url.startswith("file:///"):
        store = open_store(section.model_copy(update={"timeout_s": min(TIMEOUT_S, section.timeout_s)}))
        try:
            manifest = ArtifactStore(store, lambda text: None).find(folder.kind, folder.name)
        except (StoreError, MalformedError) as error:
            return warn("model-stored", f"{what} is not here, and the store fails: {error}", "repair the store")
        if manifest is not None:
            found = f"{what} is not here; {store.url} has a complete copy to pull ({describe(manifest)})"
            return ok("model-stored", found)
    if has_maker:
        return warn("model-stored", f"{what} is neither here nor in the store", "run `tba setup`, which makes it")
    return fail(
        "model-stored",
        f"{what} is neither here nor in the store",
        "fetch it with `tba data prepare RECIPE`, or push it from a machine that has it: tba model push",
    )
