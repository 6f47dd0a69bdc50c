"""Every flag of `tba`, in one place that imports nothing heavy: `tba --help` answers at once.

MANUAL has the texts that --help and the reference (tools/cli_docs.py) show.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tba
from tba_cli.shipped_recipes import recipe_path

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = "Post-train language models with Trajectory Balance with Asynchrony."
TARGET = ("url", "run_dir", "token_file", "ca_file")
"""The shared options that name a run and its service."""

MANUAL = """\
run: run a recipe on this machine: Redis and every service
    tba run quickstart                # a recipe that ships with tba
    tba run my.toml --resume          # continue where it stopped
    tba run --fork quickstart@1-40 --run-name warmer --set objective.beta=0.1
demo: train a small model by TBA on this machine, from nothing: the recipe quickstart as run quickstart-seedN
    tba demo --seed 1 --set trainer.num_steps=100
init: write a folder for a task of your own: recipe, prompts, scorer and examples
    tba init mytask --folder tasks/first
    tba init mytask --model models/small --data rows.jsonl
score: try the scorers of a recipe on examples, before a run
    tba score examples.jsonl --recipe mytask.toml
status: show state, components, waits and evaluations of a run
    tba status                        # the newest run under runs/
    tba status quickstart-seed0 --follow
    tba status --url https://buffer:8700 --token-file operator.token --json
pause: pause a run: no new leases, no new batches
    tba pause quickstart-seed0 --reason "the judge is down"
resume: let a paused run continue
    tba resume quickstart-seed0 --reason "the judge is down"
stop: end a run after the step in progress, with its last checkpoint and evaluation
    tba stop quickstart-seed0 --reason "the judge is down"
rollback: return to an older checkpoint, or show which ones there are
    tba rollback                      # show the checkpoints
    tba rollback --step 450 --reason "the reward fell"
set: change settings of a run in progress, or show what was changed and when
    tba set                           # show them
    tba set learning_rate=1e-4 --reason "spikes"
    tba set 'beta={kind="linear", value=0.1, final=0.01, steps=400}' quickstart-seed0
scale: start or stop searchers of a run in progress, or show how many there are
    tba scale                         # show how many there are
    tba scale 4 quickstart-seed0 --reason "the night is cheap"
env try: play one episode in this terminal, then show its tokens; a line is a reply
    tba env try my.toml --task shop   # a call: <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
config check: find what in a recipe would fail: prompts, model, scorers
    tba config check my.toml --offline --json
    tba config check my.toml --sample 8   # also ask the real model 8 prompts
config show: print the resolved recipe as JSON
    tba config show my.toml --set trainer.num_steps=50
config schema: print the JSON schema of recipes
    tba config schema > recipe.schema.json
sizing: trace and estimate the memory and disk that a recipe needs
    tba sizing gsm8k --set model.path=Qwen/Qwen2.5-7B --gpu-memory-gib 40
data prepare: fetch, make or train what is missing, then show prompts
    tba data prepare my.toml --set model.path=models/small
setup: prepare a deployed run: bucket, starting model, model folders, prompts; safe to repeat
    tba setup --config recipe.toml --create-bucket --prepare
    tba setup --config recipe.toml --only models --pull
model pull: fetch what a service needs to where the recipe wants it
    tba model pull --config recipe.toml --for searcher --wait-s 60
doctor: check everything that a run needs, and say how to fix what is wrong
    tba doctor                        # for the recipe quickstart
    tba doctor --config recipe.toml --for searcher --gpus 1 --check disk
prompts upload: upload a file; it is safe to repeat
    tba prompts upload more.jsonl quickstart-seed0
ledger check: check that the active lineage has every step exactly once
    tba ledger check quickstart-seed0
view: show the page of a run in a browser; a run that is over is served read-only until Ctrl-C
    tba view seed0                    # without a name: all runs under runs/, as `tba runs`
    tba view --url https://buffer:8700 --token-file operator.token
runs: show all runs of a folder in a browser: compare curves and recipes, read logs, open the page of each
    tba runs
    tba runs other/runs --port 8800 --no-open
table: compare finished runs in a Markdown table
    tba table runs/quickstart-seed0 runs/quickstart-seed1
rollouts list: list stored rollouts: prompt, completion, reward, version, age
    tba rollouts list quickstart-seed0 --max-reward 0 --contains "I don't know" --limit 20
    tba rollouts list quickstart-seed0 --id 0123456789abcdef0123456789abcdef
rollouts export: write stored rollouts to a Parquet file, the oldest first, with tokens and log-probs
    tba rollouts export quickstart-seed0 --out good.parquet --min-reward 1 --from-version 1-100
rescore: score the stored rollouts again, with the reward as it is now
    tba rescore quickstart-seed0 --only failed
    tba rescore --show                # how far it is, or what it changed
buffer save: save what is stored; the run may be in progress or over
    tba buffer save end quickstart-seed0
buffer load: begin a run that stores nothing yet with a snapshot
    tba buffer load quickstart/before-change new-run --version 1-40
buffer accept-loss: continue without the acknowledged changes that Redis has lost
    tba buffer accept-loss quickstart-seed0 --reason "the disk was replaced"
weights list: list the weight versions that the store has: how they are stored, and why they are kept
    tba weights list quickstart-seed0
    tba weights list --url https://buffer:8700 --token-file operator.token --recipe recipe.toml
weights gc: delete the weight versions that nothing needs, by the rule of the trainer, and half-written ones
    tba weights gc --dry-run
    tba weights gc --recipe recipe.toml --run-is-over
export: write a version of a run as a Hugging Face folder with a model card
    tba export quickstart-seed0 --version best --out model
evaluate: the published evaluation of a task: generate, score, measure, compare
    tba evaluate my.toml              # the starting model
    tba evaluate quickstart-seed0 --compare start best    # answers before and after, side by side
    tba evaluate my.toml --model model --set eval.published.num_prompts=50
"""
"""Help and examples of each command."""
GROUPS = {
    "start": "demo run init",
    "look": "runs view status table rollouts ledger",
    "data and tasks": "config score env prompts data evaluate export",
    "operate": "pause resume stop set scale rollback rescore buffer weights",
    "machines": "doctor sizing setup model",
}
"""Heading of `tba --help` -> the first words of commands below it."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; `args.command` is `module:function`, which takes the arguments and returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="tba",
        usage="tba [options] COMMAND ...",
        parents=[global_options()],
        formatter_class=_Formatter,
        epilog=_examples(
            "tba demo                          # train a small model on this machine, from nothing",
            "tba run recipes/quickstart.toml   # the same as a recipe, to be changed",
            "tba init mytask                   # begin with a task of your own",
        ),
    )
    parser.add_argument("--version", action="version", version=f"tba {tba.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, prog="tba", help=argparse.SUPPRESS)
    _add_run(commands)
    _add_task(commands)
    _add_control(commands)
    _add_config(commands)
    _add_setup(commands)
    _add_doctor(commands)
    _add_prompts(commands)
    _add_views(commands)
    _add_rollouts(commands)
    _add_buffer(commands)
    _add_weights(commands)
    _add_evaluate(commands)
    parser.description = "\n".join([DESCRIPTION, *_groups(commands)])
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line. The shared options may stand before the command or after it, once each.

    Args:
        argv: the words after `tba`; default: the arguments of this process.
    """
    args, rest = global_options().parse_known_args(argv)
    parser = build_parser()
    args, unknown = parser.parse_known_args(rest, namespace=args)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # only now: the value of an unknown flag is taken for a recipe, and the flag must be named
    for name in ("recipe", "config"):
        if getattr(args, name, None) is not None:
            try:
                setattr(args, name, recipe_path(getattr(args, name)))
            except argparse.ArgumentTypeError as error:
                parser.error(f"argument {'--config' if name == 'config' else 'RECIPE'}: {error}")
    takes = vars(args).pop("takes")
    for name in ("json", *TARGET):
        if getattr(args, name) and name not in takes:
            parser.error(f"this command does not take --{name.replace('_', '-')}")
    run = getattr(args, "run", None)
    named = [flag for flag, value in (("--url", args.url), ("--run-dir", args.run_dir), ("RUN", run)) if value]
    if "url" in takes and len(named) > 1:
        parser.error(f"argument {named[1]}: not allowed with argument {named[0]}")
    return args


def global_options() -> argparse.ArgumentParser:
    """Return the parser of the options that all commands share; a command refuses the ones that it does not take."""
    options = argparse.ArgumentParser(prog="tba", add_help=False, allow_abbrev=False)
    options.add_argument("--url", metavar="URL", help="address of the buffer service")
    options.add_argument("--run-dir", metavar="DIR", help="folder of a run that `tba run` started here")
    options.add_argument("--token-file", metavar="FILE", help="file with the operator token, or tokens file; -: stdin")
    options.add_argument("--ca-file", metavar="FILE", help="authorities to trust for an https address (tls.ca_file)")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return options


# ---- What the commands have in common --------------------------------------------------------------------------------


class _Formatter(argparse.HelpFormatter):
    """Fills a description of one line, and keeps the lines of other texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _groups(commands: Subparsers) -> Iterator[str]:
    """Yield the lines about all commands: argparse itself would list them under one heading."""
    for heading, names in GROUPS.items():
        yield f"\n{heading}:"
        yield from (f"  {name:10}{commands.choices[name].description}" for name in names.split())


def _examples(*lines: str) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])


def _command(
    group: Subparsers, words: str, function: str, *, run: bool = False, takes: Sequence[str] = (), json: bool = True
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        words: the words after `tba`, as in `MANUAL`.
        function: `module:function` of tba_cli.commands; the module is imported only when this command runs.
        run: whether the command takes RUN, and the shared options that name a run.
        takes: further shared options that it takes; it refuses the others, except for --debug.
        json: whether it takes --json.
    """
    takes = (*(TARGET if run else ()), *takes, *(["json"] if json else ()))
    also = f"also {' '.join(map(flag_of, takes))} (tba --help)\n\n" if takes else ""
    help, examples = _manual()[words]
    parser = group.add_parser(
        words.rpartition(" ")[2],
        help=help,
        description=help,
        epilog=also + _examples(*examples),
        formatter_class=_Formatter,
    )
    parser.set_defaults(command=f"tba_cli.commands.{function}", takes=takes)
    if run:
        _add_run_name(parser, "all of them" if words == "view" else "the newest")
    return parser


def _manual() -> dict[str, tuple[str, list[str]]]:
    """Return the help line and the examples of each command, by the words of the command."""
    texts: dict[str, tuple[str, list[str]]] = {}
    examples: list[str] = []
    for line in MANUAL.splitlines():
        if line.startswith("    "):
            examples.append(line.strip())
        else:
            words, _, help = line.partition(": ")
            examples = []
            texts[words] = (help, examples)
    return texts


def flag_of(name: str) -> str:
    """Return the flag of a shared option, such as `--run-dir` for `run_dir`."""
    return f"--{name.replace('_', '-')}"


def _group(commands: Subparsers, name: str, help: str) -> Subparsers:
    return commands.add_parser(name, help=help, description=help).add_subparsers(metavar="WHAT", required=True)


def _add_recipe(parser: argparse.ArgumentParser, *, nargs: str | None = None, default_is: str = "") -> None:
    help = "TOML file, or the name of a recipe that ships with tba, such as quickstart"
    help += f"; default: {default_is}" if default_is else ""
    parser.add_argument("recipe", metavar="RECIPE", nargs=nargs, help=help)
    _add_overrides(parser)


def _add_config_file(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    help = "recipe, as the services read it" + ("" if default is None else f" (default: {default})")
    parser.add_argument("--config", required=default is None, default=default, metavar="FILE", help=help)
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, for example trainer.num_steps=50"
    )


def _add_loudness(parser: argparse.ArgumentParser) -> None:
    loud = parser.add_mutually_exclusive_group()
    loud.add_argument("--quiet", action="store_true", help="only the result and errors")
    loud.add_argument("--verbose", action="store_true", help="show every log line of the services, not only warnings")


def _add_run_name(parser: argparse.ArgumentParser, default: str = "the newest") -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=f"name of a run under runs/; default: {default}")


def _add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", metavar="TEXT", help="kept in the audit, and shown to people who look at the run")


def _add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait-s", type=float, default=900.0, metavar="S", help="deadline of each wait: store, services (default: 900)"
    )


# ---- The commands ----------------------------------------------------------------------------------------------------


def _add_run(commands: Subparsers) -> None:
    run = _command(commands, "run", "run:run_command", json=False)
    _add_recipe(run, nargs="?", default_is="with --fork the recipe that the other run began with")
    run.add_argument("--run-name", metavar="NAME", help="name of the run, instead of run.name of the recipe")
    run.add_argument("--seed", type=int, metavar="N", help="seed of the run, instead of run.seed of the recipe")
    run.add_argument(
        "--fork",
        metavar="RUN@VERSION",
        help="begin with a weight version and the rollouts of another run, as quickstart@1-40; needs --run-name",
    )
    run.add_argument(
        "--buffer", metavar="RUN/NAME", help="begin with this snapshot of another run's buffer; with --fork: NAME alone"
    )
    again = run.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue the run in its folder, from its checkpoint")
    again.add_argument("--fresh", action="store_true", help="delete the folder of this run first")
    _add_loudness(run)
    demo = _command(commands, "demo", "run:demo_command", json=False)
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the run (0); the same one starts over")
    _add_overrides(demo)
    _add_loudness(demo)


def _add_task(commands: Subparsers) -> None:
    """Add the commands for a task of one's own."""
    init = _command(commands, "init", "init:init_command")
    init.add_argument("task", metavar="TASK", help="name of the task, of small letters, digits, - and _")
    init.add_argument("--folder", metavar="DIR", help="where to write; default: a new folder with the name of the task")
    init.add_argument("--model", metavar="MODEL", help="folder, or ORG/NAME on the hub: fit the recipe to it")
    init.add_argument("--data", metavar="FILE", type=Path, help="rows in TRL's format (.jsonl): a prompt, an answer")
    score = _command(commands, "score", "score:score_command")
    score.add_argument(
        "file",
        metavar="FILE",
        help='JSON Lines: {"task", "prompt", "response"}, with "data" as of a prompt, and "expected", a number, to '
        "compare with",
    )
    score.add_argument("--recipe", metavar="RECIPE", required=True, help="its scorers are tried")
    _add_overrides(score)
    play = _command(_group(commands, "env", "play an episode by hand"), "env try", "evaluate:try_command", json=False)
    _add_recipe(play)
    play.add_argument("--task", metavar="NAME", help="of this task (default: the first with an environment or tools)")
    play.add_argument("--model", action="store_true", help="let the model of the recipe reply")


def _add_control(commands: Subparsers) -> None:
    status = _command(commands, "status", "status:status_command", run=True)
    status.add_argument(
        "--follow", action="store_true", help="show what happens, line by line, until the run is over or Ctrl-C"
    )
    for name in ("pause", "resume", "stop"):
        change = _command(commands, name, "status:change_command", run=True)
        change.set_defaults(change=name)
        _add_reason(change)
    rollback = _command(commands, "rollback", "control:rollback_command", run=True)
    rollback.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="to the newest checkpoint at or before it: trainer.keep_checkpoints (2) are kept, and none goes while the "
        "run is paused. None: show them",
    )
    _add_reason(rollback)
    change = _command(commands, "set", "control:set_command", takes=TARGET)
    change.add_argument(
        "items",
        metavar="KEY=VALUE",
        nargs="*",
        help="learning_rate, beta, most_on_policy_prob, sampling_temperature, eval_every_steps; the value is a number, "
        "a schedule such as '{kind=\"linear\", value=0.1, final=0.01, steps=400}', or the word recipe (the value of "
        "the recipe). A word without = is the name of a run under runs/ (default: the newest). None: show them",
    )
    _add_reason(change)
    scale = _command(commands, "scale", "control:scale_command", takes=TARGET)
    scale.add_argument(
        "number",
        metavar="N|recipe",
        nargs="?",
        help="how many, or the word recipe (the number of recipe or chart). None: show them",
    )
    _add_run_name(scale)
    _add_reason(scale)


def _add_config(commands: Subparsers) -> None:
    kinds = _group(commands, "config", "check, show or describe recipes")
    check = _command(kinds, "config check", "config:check_command")
    _add_recipe(check)
    check.add_argument("--offline", action="store_true", help="leave out what needs a network")
    check.add_argument(
        "--sample", type=int, metavar="N", help="then ask the real model N training prompts, and score its answers"
    )
    show = _command(kinds, "config show", "config:show_command", json=False)
    _add_recipe(show)
    _command(kinds, "config schema", "config:schema_command", json=False)
    sizing = _command(commands, "sizing", "sizing:sizing_command")
    _add_recipe(sizing)
    sizing.add_argument(
        "--gpu-memory-gib",
        type=float,
        metavar="G",
        help="memory of each GPU of the layout (79, which an 80 GB card has)",
    )


def _add_setup(commands: Subparsers) -> None:
    data = _group(commands, "data", "fetch or make the models and data sets that a recipe needs")
    prepare = _command(data, "data prepare", "setup:prepare_command", json=False)
    _add_recipe(prepare)
    setup = _command(commands, "setup", "setup:setup_command", json=False)
    _add_config_file(setup)
    setup.add_argument("--create-bucket", action="store_true", help="make the bucket where there is none")
    setup.add_argument(
        "--prepare",
        action="store_true",
        help="fetch, make or train what the recipe names and neither disk nor store has",
    )
    setup.add_argument("--pull", action="store_true", help="also fetch what is in the store but not on the disk")
    setup.add_argument("--only", choices=["models", "prompts"], help="do only one part (models contacts no service)")
    _add_wait(setup)
    model = _group(commands, "model", "keep folders of models and data sets in the object store")
    pull = _command(model, "model pull", "setup:pull_command", json=False)
    _add_config_file(pull)
    pull.add_argument(
        "--for",
        dest="service",
        required=True,
        choices=["buffer", "reward", "searcher", "setup", "trainer"],
        help="the service whose folders to fetch; setup reads the data sets",
    )
    _add_wait(pull)


def _add_doctor(commands: Subparsers) -> None:
    doctor = _command(commands, "doctor", "doctor:doctor_command")
    _add_config_file(doctor, default="quickstart")
    doctor.add_argument(
        "--for",
        dest="service",
        choices=["buffer", "reward", "searcher", "trainer"],
        help="what this machine is for (default: every service that is installed here)",
    )
    doctor.add_argument("--check", action="append", default=[], metavar="NAME", help="only this one: gpu, disk, ...")
    doctor.add_argument("--gpus", type=int, metavar="N", help="how many GPUs should be seen here, no more and no fewer")


def _add_prompts(commands: Subparsers) -> None:
    kinds = _group(commands, "prompts", "upload the prompts of a run")
    upload = _command(kinds, "prompts upload", "prompts:upload_command", takes=TARGET)
    upload.add_argument(
        "file", metavar="FILE", type=Path, help='JSONL, rows of {"prompt_id", "task", "text", "data", "split"}'
    )
    _add_run_name(upload)


def _add_views(commands: Subparsers) -> None:
    kinds = _group(commands, "ledger", "check what each optimizer step consumed")
    _command(kinds, "ledger check", "report:check_command", run=True)
    view = _command(commands, "view", "view:view_command", run=True)
    runs = _command(commands, "runs", "view:view_command")
    runs.add_argument("folder", metavar="FOLDER", nargs="?", default="runs", help="the folder of the runs (runs)")
    for command in (view, runs):
        command.add_argument(
            "--port", type=int, default=0, metavar="N", help="port of a page that is served here (default: a free one)"
        )
        command.add_argument("--no-open", action="store_true", help="only print the address")
    table = _command(commands, "table", "report:table_command")
    table.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="folders of finished runs")


def _add_rollouts(commands: Subparsers) -> None:
    kinds = _group(commands, "rollouts", "list and export the stored rollouts of a run")
    listed = _command(kinds, "rollouts list", "rollouts:list_command", run=True)
    orders = ["newest", "oldest", "best", "worst"]
    listed.add_argument("--order", choices=orders, default="newest", help="which ones to show first (default: newest)")
    listed.add_argument("--limit", type=int, default=5, metavar="N", help="how many (default: 5)")
    listed.add_argument(
        "--text-chars", type=int, default=400, metavar="N", help="how much of each text to show (default: 400)"
    )
    listed.add_argument(
        "--id",
        metavar="ROLLOUT_ID",
        help="print all of this one as JSON, without filters; all 32 hexadecimal digits, as `tba rollouts list` prints "
        "them",
    )
    export = _command(kinds, "rollouts export", "rollouts:export_command", run=True)
    export.add_argument("--out", metavar="FILE", required=True, help="a file that ends with .parquet")
    export.add_argument("--force", action="store_true", help="replace the file if it exists")
    for command in (listed, export):
        _add_filters(command)
    rescore = _command(commands, "rescore", "rescore:rescore_command", run=True)
    rescore.add_argument("--task", metavar="NAME", help="only rollouts of this task")
    rescore.add_argument(
        "--only", choices=["all", "scored", "failed", "pending"], default="all", help="only rollouts of this status"
    )
    rescore.add_argument(
        "--show", action="store_true", help="start nothing; show the progress of this one or the result of the last one"
    )


def _add_filters(parser: argparse.ArgumentParser) -> None:
    filters = parser.add_argument_group("filters", "only rollouts that match all of them")
    filters.add_argument("--prompt-id", metavar="ID", help="of this prompt")
    filters.add_argument("--task", metavar="NAME", help="of this task")
    filters.add_argument("--version", metavar="VERSION", help="of this policy version, for example 1-40")
    filters.add_argument("--from-version", metavar="VERSION", help="of this policy version or a newer one")
    filters.add_argument("--to-version", metavar="VERSION", help="of this policy version or an older one")
    filters.add_argument("--status", choices=["scored", "pending", "failed"], help="with this reward status")
    filters.add_argument("--min-reward", type=float, metavar="R", help="with at least this reward")
    filters.add_argument("--max-reward", type=float, metavar="R", help="with at most this reward")
    filters.add_argument(
        "--searcher", dest="searcher_id", metavar="ID", help="of this searcher, for example searcher-0"
    )
    filters.add_argument("--finish-reason", choices=["stop", "stop_string", "length", "abort"], help="that ended so")
    filters.add_argument("--environment", metavar="NAME", help="episodes of this environment")
    filters.add_argument("--stop-condition", metavar="NAME", help="episodes that this ended, for example max_turns")
    boundaries = ["engine", "environment", "tool", "sandbox", "judge", "limit"]
    filters.add_argument("--failure-boundary", choices=boundaries, help="episodes that failed there")
    filters.add_argument("--contains", metavar="TEXT", help="with this text in prompt or completion, in any case")


def _add_buffer(commands: Subparsers) -> None:
    kinds = _group(commands, "buffer", "save the rollouts of a run, and begin another one with them")
    save = _command(kinds, "buffer save", "buffer:save_command", takes=TARGET)
    save.add_argument("name", metavar="NAME", help="name of the snapshot; no other of this run may have it")
    _add_run_name(save)
    load = _command(kinds, "buffer load", "buffer:load_command", takes=TARGET)
    load.add_argument("source", metavar="RUN/NAME", help="the snapshot, in the store of the run")
    load.add_argument("--version", metavar="VERSION", help="fork: rollouts up to the publication of this version")
    _add_run_name(load)
    accept = _command(kinds, "buffer accept-loss", "buffer:accept_loss_command", run=True)
    _add_reason(accept)


def _add_weights(commands: Subparsers) -> None:
    kinds = _group(commands, "weights", "list and delete the weight versions of a run")
    listed = _command(kinds, "weights list", "weights:list_command", run=True)
    gc = _command(kinds, "weights gc", "weights:gc_command", run=True)
    for command in (listed, gc):
        command.add_argument(
            "--recipe",
            metavar="RECIPE",
            help="recipe of the run; needed with --url. Alone: its store is read, and no service is asked",
        )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    gc.add_argument(
        "--run-is-over",
        action="store_true",
        help="delete even if no buffer service says what is held: nothing samples, trains, or will resume",
    )
    export = _command(commands, "export", "export:export_command", run=True)
    export.add_argument(
        "--version", default="last", metavar="VERSION", help="LINEAGE-STEP, start, best, or last (default)"
    )
    export.add_argument("--recipe", metavar="RECIPE", help="recipe of the run; needed with --url")
    export.add_argument("--out", metavar="DIR", required=True, help="folder to write; must not exist")


def _add_evaluate(commands: Subparsers) -> None:
    evaluate = _command(commands, "evaluate", "evaluate:evaluate_command", takes=["token_file"])
    evaluate.add_argument(
        "source",
        metavar="RECIPE|RUN",
        help="a recipe (.toml): its starting model, or --model; a run under runs/: one of its versions",
    )
    evaluate.add_argument("--model", metavar="FOLDER", help="evaluate this Hugging Face folder, for example an export")
    evaluate.add_argument(
        "--version", metavar="VERSION", help="of the run: LINEAGE-STEP, start, best, or last (default)"
    )
    evaluate.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="evaluate two versions, and show both answers to each prompt, those that changed first",
    )
    evaluate.add_argument(
        "--limit", type=int, metavar="N", help="with --compare: how many prompts to show (default: 20)"
    )
    evaluate.add_argument("--reward-url", metavar="URL", help="address of the reward service (default: it starts one)")
    evaluate.add_argument("--out", metavar="DIR", help="where to write (default: evaluations/RUN/VERSION or the like)")
    _add_overrides(evaluate)
    _add_loudness(evaluate)


# ---- A walk through the commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A command of tba."""

    words: str
    """The words after `tba`."""
    help: str
    """One line about the command."""
    parser: argparse.ArgumentParser

    @property
    def takes(self) -> list[str]:
        """The flags of the shared options that it takes, without --debug."""
        return [flag_of(name) for name in self.parser.get_default("takes")]

    @property
    def examples(self) -> list[str]:
        """Example command lines, with comments."""
        return [line.strip() for line in (self.parser.epilog or "").partition("examples:\n")[2].splitlines()]


def commands_of(parser: argparse.ArgumentParser, words: str = "") -> Iterator[Command]:
    """Yield every command below a parser, in their order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                own = f"{words} {name}".strip()
                if child.get_default("command") is not None:
                    yield Command(own, child.description or "", child)
                yield from commands_of(child, own)
