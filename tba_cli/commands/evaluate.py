"""`tba evaluate`: the published evaluation of a model; answers for `tba config check --sample`; and `tba env try`."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tba.api import Prompt
from tba.config import Recipe, load_recipe, parse_recipe
from tba.errors import ConfigError
from tba.evaluation.evaluation_job import EvaluationJob, EvaluationReport
from tba.model_folders import check_embedding_model, check_tokenizer
from tba.tokens import role_token
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba.wire.weight_manifest import encode_manifest
from tba_cli.artifacts.prepared import check_prepared
from tba_cli.commands.export import choose, source_of
from tba_cli.commands.run import loudness_of
from tba_cli.local.evaluate import EvaluationConsole, evaluate_here
from tba_cli.prompts.reader import heldout_prompts, prompts_of
from tba_cli.reports.answers import compare, comparison_lines
from tba_cli.reports.comparison import evaluation_markdown
from tba_cli.reports.sample import SampledAnswer
from tba_cli.resolve import with_absolute_paths
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import run_folder, runs_beside

NUM_SHOWN = 20
"""Prompts that --compare shows without --limit."""
OUT_DIR = Path("evaluations")
RECIPE_SUFFIXES = (".toml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to evaluate: a folder, or a version in a store."""

    recipe: Recipe
    description: str
    name: str
    """Name of the result's folder."""
    folder: Path | None = None
    versions: WeightVersions | None = None
    version: PolicyVersion | None = None


def evaluate_command(args: argparse.Namespace) -> int:
    """Evaluate a model and print the tables; with --compare, evaluate two versions and print their differences."""
    console = EvaluationConsole("quiet" if args.json else loudness_of(args))
    if args.compare is not None:
        return _compare_command(args, console)
    if args.limit is not None:
        raise ConfigError("--limit says how many prompts --compare A B shows; add that, or leave --limit out")
    if not args.source.endswith(RECIPE_SUFFIXES):
        subject = _of_run(args, args.version)
    elif args.version is not None:
        # a recipe may belong to many runs
        raise ConfigError(f"--version names a version of a run, and {args.source} is a recipe; name the run instead")
    else:
        recipe = with_absolute_paths(load_recipe(args.source, sets=args.set))
        what = f"model.path of {args.source}"
        subject = _of_start(recipe, what) if args.model is None else _of_folder(recipe, args.model)
    prompts = _prompts(subject.recipe, args)
    out = Path(args.out) if args.out else OUT_DIR / subject.recipe.run.name / subject.name
    report = _evaluate(subject, prompts, out, args, console)
    if args.json:
        print(report.model_dump_json(indent=2, ensure_ascii=True))
        return 0
    console.result(evaluation_markdown(report))
    console.result(f"evaluation: {out / 'evaluation.json'}")
    return 0


def _compare_command(args: argparse.Namespace, console: EvaluationConsole) -> int:
    """Evaluate two versions of a run on the same prompts, and print both answers to each."""
    if args.source.endswith(RECIPE_SUFFIXES) or args.model is not None or args.version is not None:
        raise ConfigError(
            "--compare names two versions of a run, as in `tba evaluate RUN --compare start best`; it does not go with "
            "a recipe, --model or --version"
        )
    limit = NUM_SHOWN if args.limit is None else args.limit
    if limit < 0:
        raise ConfigError(f"--limit {limit} is out of range; give 0 or more")
    before, after = (_of_run(args, which) for which in args.compare)
    if before.version == after.version:
        raise ConfigError(f"--compare {' '.join(args.compare)}: both are version {after.version}; name two versions")
    prompts, run = _prompts(after.recipe, args), after.recipe.run.name
    out = Path(args.out) if args.out else OUT_DIR / run
    if RunFolder(out).marker_path.exists():
        raise ConfigError(f"--out {out} is the folder of a run or of one evaluation; name another one")
    folders = (out / before.name, out / after.name)
    for subject, folder in zip((before, after), folders, strict=True):
        _evaluate(subject, prompts, folder, args, console)
    found = compare(after.recipe.eval, prompts, folders, run=run, versions=(before.name, after.name))
    path = out / f"{before.name}-and-{after.name}.json"
    path.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(found.model_dump_json(indent=1, ensure_ascii=True))
        return 0
    console.result("\n".join(comparison_lines(found, limit=limit)))
    console.result(f"all pairs: {path}")
    return 0


def try_command(args: argparse.Namespace) -> int:
    """Become the program that plays one episode in this terminal."""
    sets = [*args.set, "searcher.engine=embedded"]
    recipe = load_recipe(args.recipe, sets=sets)
    check_prepared(recipe)
    tasks = recipe.environments.keys() & ({args.task} if args.task else recipe.environments)
    prompt = next((prompt for prompt in prompts_of(recipe) if prompt.task in tasks), None)
    if prompt is None:
        raise ConfigError(f"no prompt of {args.recipe} has such a task with an environment or tools; correct --task")
    os.environ.setdefault("TBA_LOG_FORMAT", "console")
    words = [prompt.model_dump_json(), "model" if args.model else "hand", "--config", str(args.recipe)]
    words += [word for item in sets for word in ("--set", item)]
    os.execv(sys.executable, [sys.executable, "-m", "tba_searcher.evaluation.try_episode", *words])


def _check_engine(recipe: Recipe) -> None:
    # its numbers would look like those of a model
    if recipe.searcher.engine == "simulated":
        raise ConfigError(
            'searcher.engine = "simulated" generates random completions; give --set searcher.engine=embedded, or vllm'
        )


def _prompts(recipe: Recipe, args: argparse.Namespace) -> list[Prompt]:
    """Return the held-out prompts of an evaluation; raise ConfigError if anything that it needs is missing."""
    _check_engine(recipe)
    if args.reward_url is None:
        check_prepared(recipe)
    check_embedding_model(recipe.eval.embedding_model)
    # a missing token has to fail now, and not after the model was downloaded
    role_token(recipe.auth.tokens_file, "searcher")
    prompts = heldout_prompts(recipe)[: recipe.eval.published.num_prompts]
    for key in recipe.eval.published.by:
        for prompt in prompts:
            # True is an int in Python, and would be one group with 1
            if isinstance(value := prompt.data.get(key), bool) or not isinstance(value, str | int | float):
                raise ConfigError(
                    f"eval.published.by names {key!r}, and held-out prompt {prompt.prompt_id} has {value!r} there, "
                    "which is neither text nor a number; add the key to data in [[data.sets]], or remove it from by"
                )
    return prompts


def _evaluate(
    subject: Subject, prompts: list[Prompt], out: Path, args: argparse.Namespace, console: EvaluationConsole
) -> EvaluationReport:
    """Download one model if it is in a store, and evaluate it in the folder `out`, whose old content is deleted.

    Raises:
        TbaError: as `evaluate_here`, or the store holds something damaged.
    """
    if played := sorted({prompt.task for prompt in prompts} & subject.recipe.environments.keys()):
        raise ConfigError(
            f"task {played[0]!r} is played with environments.{played[0]}, and only a run plays episodes; its own "
            "evaluations do (eval.every_steps). Name another recipe, with prompts of one turn"
        )
    folder = RunFolder(out)
    # clear() below deletes the content: only our own folder, or an empty one, may lose it
    if out.exists() and not (out.is_dir() and (folder.marker_path.exists() or not any(out.iterdir()))):
        raise ConfigError(f"--out {out} exists and is not the folder of an evaluation; name another one")
    with folder.acquire(resume=False, fresh=True) as lock_fd:
        if folder.has_begun:
            raise ConfigError(f"--out {out} is the folder of a run; name another one")
        folder.clear()
        folder.logs_path.mkdir()
        # in the result's folder, which has room for it; /tmp may be small
        with tempfile.TemporaryDirectory(dir=folder.path, prefix="weights-") as weights:
            model, manifest = subject.folder, None
            if subject.versions is not None and subject.version is not None:
                model, manifest = Path(weights) / str(subject.version), Path(weights) / "manifest.json"
                fetched = subject.versions.download_model(subject.version, model)
                manifest.write_bytes(encode_manifest(fetched.manifest))
            assert model is not None
            start = None
            if subject.recipe.eval.published.perplexity:
                if subject.versions is None or not subject.versions.exists(START):
                    what = "the starting model, for eval.published.perplexity,"
                    start = _checked(subject.recipe.model.path, what)
                else:
                    start = Path(weights) / str(START)
                    # else it is the evaluated model, and here already
                    if subject.version != START:
                        subject.versions.download_model(START, start)
            job = EvaluationJob(
                subject=subject.description,
                model=model,
                version=None if subject.version is None else str(subject.version),
                manifest=manifest,
                start=start,
                prompts=prompts,
                out=folder.path,
            )
            console.info(f"evaluating {job.subject} on {len(prompts)} prompts")
            return evaluate_here(
                subject.recipe, job, folder=folder, lock_fd=lock_fd, reward_url=args.reward_url, console=console
            )


def sample_answers(
    recipe: Recipe, prompts: Sequence[Prompt], num: int, console: EvaluationConsole
) -> list[list[SampledAnswer]]:
    """Let the starting model answer up to `num` training prompts as in a run; return the scored answers to each."""
    _check_engine(recipe)
    train = [prompt for prompt in prompts if prompt.split == "train"]
    if not train:
        raise ConfigError("--sample N asks training prompts, and none could be read; the lines above say why")
    random.Random(recipe.run.seed).shuffle(train)
    # the tasks take turns, so that a mix shows each of them
    turns: dict[str, count[int]] = defaultdict(count)
    asked = {prompt.prompt_id: prompt for prompt in sorted(train, key=lambda one: next(turns[one.task]))[:num]}
    document, temperature = recipe.model_dump(mode="json"), recipe.searcher.sampling_temperature
    published = {"greedy": False, "num_samples": recipe.sampling.group_size, "temperature": temperature}
    document["eval"] |= {"embedding_model": None, "published": published}
    subject, out = _of_start(parse_recipe(document, where="recipe"), "model.path"), OUT_DIR / recipe.run.name / "sample"
    _evaluate(subject, list(asked.values()), out, argparse.Namespace(reward_url=None), console)
    console.info(f"all answers: {out / 'completions.jsonl'}")
    groups: dict[str, list[SampledAnswer]] = {}
    with (out / "completions.jsonl").open("rb") as file:
        for line in map(json.loads, file):
            prompt = asked[line["prompt_id"]]
            answer = SampledAnswer(
                task=prompt.task,
                prompt_id=prompt.prompt_id,
                prompt_text=prompt.text,
                num_response_tokens=line["num_tokens"],
                response_text=line["text"],
                finish_reason=line["finish_reason"],
                reward=line["scores"][prompt.task],
                reward_reason=line["unknown"].get(prompt.task),
            )
            groups.setdefault(prompt.prompt_id, []).append(answer)
    return list(groups.values())


def _of_start(recipe: Recipe, what: str) -> Subject:
    folder = _checked(recipe.model.path, what)
    return Subject(recipe=recipe, description=f"starting model {folder}", name="start", folder=folder)


def _of_run(args: argparse.Namespace, which: str | None) -> Subject:
    """Return the version `which` of a run as the subject, or the folder of --model with the run's recipe."""
    target = argparse.Namespace(
        url=None, run_dir=None, run=args.source, token_file=args.token_file, ca_file=None, recipe=None
    )
    folder = run_folder(target)
    if not (path := folder.config_path).exists():
        raise ConfigError(
            f"{args.source!r} is neither a recipe ({' or '.join(RECIPE_SUFFIXES)}) nor a run: there is no {path}; the "
            f"runs beside it are: {runs_beside(folder.path)}"
        )
    # without the variables of this shell: the run was started with others
    recipe = with_absolute_paths(load_recipe(path, sets=args.set, environ={}))
    if args.model is not None:
        if which is not None:
            raise ConfigError("--model names a folder and --version a version of the run; give one of them")
        return _of_folder(recipe, args.model)
    source = source_of(target)
    version = choose(which or "last", source)
    return Subject(
        recipe=recipe,
        description=f"version {version} of run {recipe.run.name!r}",
        name=str(version),
        versions=source.versions,
        version=version,
    )


def _of_folder(recipe: Recipe, text: str) -> Subject:
    folder = _checked(Path(text).absolute(), "--model")
    return Subject(recipe=recipe, description=f"model folder {folder}", name=f"folder-{folder.name}", folder=folder)


def _checked(path: str | Path, what: str) -> Path:
    """Return `path`; raise ConfigError unless it is a folder with a model and tokenizer. `what`: its name in errors."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{what} {folder} holds no model (config.json); `tba data prepare RECIPE` fetches the models of a recipe, "
            "and a model made by a warm start is made by `tba run`"
        )
    check_tokenizer(folder)
    return folder
