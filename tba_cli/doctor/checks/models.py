"""Check that the models that the services of this machine read are complete, here or in the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tba.errors import ConfigError, MalformedError, StoreError
from tba.model_folders import check_tokenizer
from tba.store import open_store
from tba_cli.artifacts import ArtifactStore, RequiredFolder, required_folders
from tba_cli.artifacts.artifact_store import describe
from tba_cli.artifacts.prepared import made_at_start
from tba_cli.artifacts.required import Service
from tba_cli.doctor.target import CheckResult, Target, fail, ok, warn
from tba_cli.starter_models.weight_files import tensors_of

TIMEOUT_S = 5.0


def check_models(target: Target) -> Iterator[CheckResult]:
    """Check every folder that the recipe names for the services of this machine."""
    names: tuple[Service, ...] = ("reward", "searcher", "trainer")
    found = [folder for name in names if name in target.services for folder in required_folders(target.recipe, name)]
    if not found:
        yield ok("model", f"{', '.join(sorted(target.services))} needs no folder of this recipe")
    # several services may need one folder
    for folder in dict.fromkeys(found):
        path, what = Path(folder.path).expanduser(), f"{folder.path} ({folder.key})"
        if not folder.is_here:
            yield _elsewhere(target, folder, what)
            continue
        try:
            if not (path / "config.json").is_file():
                raise ConfigError("it holds no config.json, so it is not a model in Hugging Face format")
            tensors = tensors_of(path)
            if folder.key == "model.path":
                check_tokenizer(path)
        except ConfigError as error:
            fix = "remove the folder and fetch it again: tba data prepare RECIPE, or tba model pull"
            yield fail("model", f"{what}: {error}", fix)
        else:
            size_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            yield ok("model", f"{what}: {len(tensors)} tensors, {size_bytes / 2**20:,.1f} MiB")


def _elsewhere(target: Target, folder: RequiredFolder, what: str) -> CheckResult:
    section = target.recipe.store
    has_maker = target.recipe.model.warm_start is not None and folder.key == "model.path"
    if target.is_local and has_maker:
        return ok("model", f"{what} is not there yet; `tba run` makes it")
    if target.is_local and folder.path in made_at_start(target.recipe):
        return ok("model", f"{what} is not there yet; `tba run` fetches or makes it")
    # a relative file:// store lies in a run folder, which does not exist yet
    if not section.url.startswith("file://") or section.url.startswith("file:///"):
        store = open_store(section, timeout_s=TIMEOUT_S)
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
        "fetch it with `tba data prepare RECIPE`, or push it from a machine that has it: tba setup --only models",
    )
