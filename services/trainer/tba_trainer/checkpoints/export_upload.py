"""The export of a run in the object store, under runs/<run>/export/: the last version with its model card."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tba.api import RunInfo
from tba.config import Recipe
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.weights.export import RunFacts, write_export

log = get_logger("export")


def upload_export(recipe: Recipe, info: RunInfo, store: ObjectStore, *, last: PolicyVersion) -> str:
    """Write the export, upload it and return its prefix in the store. A second export replaces the files.

    Args:
        info: the run as the buffer knows it: evaluations and the best version go on the card.
        last: the last published version.

    Raises:
        StoreError: the store is away, or its copy of the version is damaged.
    """
    prefix, versions = f"runs/{recipe.run.name}/export/", WeightVersions(store, recipe.run.name)
    facts = RunFacts(recipe=recipe, evals=info.evals, best=info.best)
    # Written to this machine first: a version that turns out to be damaged leaves the old export as it was.
    with tempfile.TemporaryDirectory(prefix="tba-export-") as name:
        write_export(versions, last, Path(name), facts)
        paths = {prefix + path.name: path for path in sorted(Path(name).iterdir())}
        for key, path in paths.items():
            store.put_file(key, path)
    # only now: until the new files are there, the old export is a whole one
    for key in set(store.list(prefix)) - paths.keys():
        store.delete(key)
    log.info("exported", version=str(last), prefix=prefix, store=store.url)
    return prefix
