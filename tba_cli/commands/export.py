"""`tba export`: write any published version of a run as a Hugging Face folder with a card.

It needs no torch.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, MalformedError
from tba.store import open_store
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba.weights.export import RunFacts, write_export
from tba_cli.console import print_answer
from tba_cli.reports.history import load_history
from tba_cli.run_target import ended_run, open_client, run_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Exportable:
    """A run whose versions can be exported. `latest`: the version announced last; None if no buffer was asked."""

    facts: RunFacts
    latest: PolicyVersion | None = None

    @property
    def versions(self) -> WeightVersions:
        """The published versions."""
        return WeightVersions(open_store(self.facts.recipe.store), self.facts.recipe.run.name)


def export_command(args: argparse.Namespace) -> int:
    """Download the version, verify it, and write the folder."""
    out = Path(args.out).resolve()
    if out.exists():
        raise ConfigError(f"--out {out} exists already; name a folder that does not")
    source = source_of(args)
    version = choose(args.version, source)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=out.parent, prefix=".tba-export-")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made ({error.strerror}); name another folder") from None
    with temporary as name:
        half = Path(name) / "export"
        write_export(source.versions, version, half, source.facts)
        # one step: nobody sees a folder that is half written
        half.rename(out)
    run = source.facts.recipe.run.name
    line = f"exported version {version} of run {run!r} to {out}"
    print_answer({"run": run, "version": str(version), "out": str(out)}, [line], as_json=args.json)
    return 0


def choose(which: str, source: Exportable) -> PolicyVersion:
    """Return the version that `which` names: LINEAGE-STEP, start, best, or last."""
    # the store and not the buffer decides: a version may be announced and deleted since
    run, existing = source.facts.recipe.run, source.versions.versions()
    if not existing:
        raise ConfigError(f"run {run.name!r} has published no version yet")
    if which == "last":
        # the buffer knows which one was announced last; without it the newest of the store has to do
        return source.latest or existing[-1]
    newest = f"the newest are {', '.join(map(str, existing[-8:]))}"
    if which == "best":
        if source.facts.best is None:
            raise ConfigError(
                f"run {run.name!r} has no best version: no finished evaluation has eval.best_metric; {newest}"
            )
        version = PolicyVersion.parse(source.facts.best.version)
    elif which == "start":
        # a fork begins at the step of the version that it continues, under a name of its own
        begin = START if run.fork_version is None else PolicyVersion.parse(run.fork_version)
        version = next((found for found in existing if found.step == begin.step), begin)
    else:
        try:
            version = PolicyVersion.parse(which)
        except MalformedError:
            raise ConfigError(
                f"{which!r} names no version of run {run.name!r}; give LINEAGE-STEP, start, best or last; {newest}"
            ) from None
    if version not in existing:
        raise ConfigError(f"run {run.name!r} has no weight version {which} (any more: trainer.keep_versions); {newest}")
    return version


def source_of(args: argparse.Namespace) -> Exportable:
    """Return the facts about a run: from the buffer service while it is in progress, else from its folder."""
    recipe = recipe_of(args)
    ended = ended_run(args)
    if ended is not None:
        # a run that was stopped before its end left no history: its card has no evaluations
        if not ended.history_path.exists():
            return Exportable(facts=RunFacts(recipe=recipe))
        history = load_history(ended.history_path)
        return Exportable(facts=RunFacts(recipe=recipe, evals=history.info.evals, best=history.info.best))
    with closing(open_client(args)) as client:
        info = client.run()
    # with --url, recipe and service are named apart from each other
    if info.run != recipe.run.name:
        raise ConfigError(f"the recipe is that of run {recipe.run.name!r}, but {args.url} serves run {info.run!r}")
    latest = None if info.latest_version is None else PolicyVersion.parse(info.latest_version)
    facts = RunFacts(recipe=recipe, evals=info.evals, best=info.best)
    return Exportable(facts=facts, latest=latest)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe of the run, whose store holds the versions."""
    if args.recipe:
        return load_recipe(args.recipe)
    if args.url:
        raise ConfigError("--url needs --recipe too: it says which object store holds the versions")
    folder = run_folder(args)
    if not folder.config_path.exists():
        raise ConfigError(f"there is no run in {folder.path}; give --url and --recipe, or another run")
    return load_recipe(folder.config_path, environ={})
