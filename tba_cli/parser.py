"""Every flag of `tba`, in one place that imports nothing heavy: `tba --help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tba
from tba_cli.parser_help import TARGET, add_help, global_options, take
from tba_cli.parser_tasks import (
    add_init,
    add_overrides,
    add_recipe,
    add_score,
)
from tba_cli.parser_views import (
    add_rescore,
    add_rollouts,
    add_target,
    add_view,
    add_weights,
)
from tba_cli.shipped_recipes import recipe_path

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = "Post-train language models with Trajectory Balance with Asynchrony."


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; `args.command` is `module:function`, which takes the arguments and returns an exit code."""
    parser = argparse.ArgumentParser(prog="tba", description=DESCRIPTION, parents=[global_options()])
    parser.add_argument("--version", action="version", version=f"tba {tba.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_demo(commands)
    add_init(commands)
    add_score(commands)
    _add_control(commands)
    _add_set(commands)
    _add_scale(commands)
    _add_config(commands)
    _add_data(commands)
    _add_setup(commands)
    _add_model(commands)
    _add_doctor(commands)
    _add_prompts(commands)
    _add_ledger(commands)
    add_view(commands)
    add_rollouts(commands)
    add_rescore(commands)
    _add_buffer(commands)
    add_weights(commands)
    _add_export(commands)
    _add_evaluate(commands)
    _add_reports(commands)
    _add_sizing(commands)
    add_help(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line. The options of tba itself may stand before a command or behind it, once.

    Args:
        argv: the words after `tba`; default: those of this process.
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
    takes = {"debug", *vars(args).pop("takes", ())}
    for name in ("json", *TARGET):
        if getattr(args, name) and name not in takes:
            parser.error(f"this command does not take --{name.replace('_', '-')}")
    run = getattr(args, "run", None)
    named = [flag for flag, value in (("--url", args.url), ("--run-dir", args.run_dir), ("RUN", run)) if value]
    if "url" in takes and len(named) > 1:
        parser.error(f"argument {named[1]}: not allowed with argument {named[0]}")
    return args


def _add_run(commands: Subparsers) -> None:
    run = commands.add_parser("run", help="run a recipe on this machine: Redis and every service")
    add_recipe(run, nargs="?", default_is="with --fork the recipe that the other run began with")
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
    run.set_defaults(command="tba_cli.commands.run:run_command")


def _add_demo(commands: Subparsers) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small model by TBA on this machine, from nothing: the recipe quickstart as run quickstart-seedN",
    )
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the run (0); the same one starts over")
    add_overrides(demo)
    _add_loudness(demo)
    demo.set_defaults(command="tba_cli.commands.run:demo_command")


def _add_loudness(parser: argparse.ArgumentParser) -> None:
    loud = parser.add_mutually_exclusive_group()
    loud.add_argument("--quiet", action="store_true", help="only the result and errors")
    loud.add_argument("--verbose", action="store_true", help="show every log line of the services, not only warnings")


def _add_control(commands: Subparsers) -> None:
    helps = {
        "status": "show state, components, waits and evaluations of a run",
        "pause": "pause a run: no new leases, no new batches",
        "resume": "let a paused run continue",
        "stop": "end a run after the step in progress, with its last checkpoint and evaluation",
        "rollback": "return to an older checkpoint, or show which ones there are",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text)
        add_target(command)
        if name == "status":
            command.add_argument(
                "--follow", action="store_true", help="show what happens, line by line, until the run is over or Ctrl-C"
            )
        else:
            command.add_argument("--reason", metavar="TEXT", help="shown to people who look at the run")
        if name == "rollback":
            command.add_argument(
                "--step",
                type=int,
                metavar="N",
                help="to the newest checkpoint at or before it: trainer.keep_checkpoints (2) are kept, and none goes "
                "while the run is paused. None: show them",
            )
        # a name and not the function: its module, with all that it imports, is loaded for this command alone
        module = "control" if name == "rollback" else "status"
        command.set_defaults(command=f"tba_cli.commands.{module}:{name}_command")


def _add_set(commands: Subparsers) -> None:
    command = commands.add_parser("set", help="change settings of a run in progress, or show what was changed and when")
    command.add_argument(
        "items",
        metavar="KEY=VALUE",
        nargs="*",
        help="learning_rate, beta, most_on_policy_prob, sampling_temperature, eval_every_steps; the value is a number, "
        "a schedule such as '{kind=\"linear\", value=0.1, final=0.01, steps=400}', or the word recipe (the value of "
        "the recipe). A word without = is the name of a run under runs/ (default: the newest). None: show them",
    )
    add_target(command, with_run=False)
    command.add_argument("--reason", metavar="TEXT", help="kept in the audit")
    command.set_defaults(command="tba_cli.commands.control:set_command")


def _add_scale(commands: Subparsers) -> None:
    command = commands.add_parser(
        "scale", help="start or stop searchers of a run in progress, or show how many there are"
    )
    command.add_argument(
        "number",
        metavar="N|recipe",
        nargs="?",
        help="how many, or the word recipe (the number of recipe or chart). None: show them",
    )
    add_target(command)
    command.add_argument("--reason", metavar="TEXT", help="kept in the audit")
    command.set_defaults(command="tba_cli.commands.control:scale_command")


def _add_config(commands: Subparsers) -> None:
    config = commands.add_parser("config", help="check, show or describe recipes")
    kinds = config.add_subparsers(metavar="WHAT", required=True)
    check = kinds.add_parser("check", help="find what in a recipe would fail: prompts, model, scorers, devices")
    add_recipe(check)
    check.add_argument("--offline", action="store_true", help="leave out what needs a network")
    check.add_argument("--full", action="store_true", help="also load large networks of scorers; may take minutes")
    check.set_defaults(command="tba_cli.commands.config:check_command")
    show = kinds.add_parser("show", help="print the resolved recipe as JSON")
    add_recipe(show)
    show.set_defaults(command="tba_cli.commands.config:show_command")
    schema = kinds.add_parser("schema", help="print the JSON schema of recipes")
    schema.set_defaults(command="tba_cli.commands.config:schema_command")


def _add_sizing(commands: Subparsers) -> None:
    sizing = commands.add_parser("sizing", help="trace and estimate the memory and disk that a recipe needs")
    add_recipe(sizing)
    card_help = "memory of each GPU of the layout (79, which an 80 GB card has)"
    sizing.add_argument("--gpu-memory-gib", type=float, metavar="G", help=card_help)
    sizing.set_defaults(command="tba_cli.commands.sizing:sizing_command")


def _add_data(commands: Subparsers) -> None:
    data = commands.add_parser("data", help="fetch or make the models and data sets that a recipe needs")
    kinds = data.add_subparsers(metavar="WHAT", required=True)
    prepare = kinds.add_parser(
        "prepare", help="fetch, make or train what is missing, then check models, columns and prompts"
    )
    add_recipe(prepare)
    prepare.set_defaults(command="tba_cli.commands.setup:prepare_command")


def _add_setup(commands: Subparsers) -> None:
    setup = commands.add_parser(
        "setup",
        help="prepare a deployed run: bucket, starting model, model folders, prompts; safe to repeat",
    )
    _add_config_file(setup)
    setup.add_argument("--create-bucket", action="store_true", help="make the bucket where there is none")
    setup.add_argument(
        "--prepare",
        action="store_true",
        help="fetch, make or train what the recipe names and neither disk nor store has",
    )
    setup.add_argument("--pull", action="store_true", help="also fetch what is in the store but not on the disk")
    setup.add_argument("--only", choices=["models", "prompts"], help="do only one part (models contacts no service)")
    setup.add_argument(
        "--wait-s", type=float, default=900.0, metavar="S", help="deadline of each wait: store, services (default: 900)"
    )
    setup.set_defaults(command="tba_cli.commands.setup:setup_command")


def _add_model(commands: Subparsers) -> None:
    model = commands.add_parser("model", help="keep folders of models and data sets in the object store")
    kinds = model.add_subparsers(metavar="WHAT", required=True)
    pull = kinds.add_parser("pull", help="fetch what a service needs to where the recipe wants it")
    _add_config_file(pull)
    pull.add_argument(
        "--for",
        dest="service",
        required=True,
        choices=["buffer", "reward", "searcher", "setup", "trainer"],
        help="the service whose folders to fetch; setup reads the data sets",
    )
    pull.add_argument(
        "--wait-s", type=float, default=900.0, metavar="S", help="how many seconds to wait for them (default: 900)"
    )
    pull.set_defaults(command="tba_cli.commands.setup:pull_command")


def _add_doctor(commands: Subparsers) -> None:
    doctor = commands.add_parser("doctor", help="check everything that a run needs, and say how to fix what is wrong")
    _add_config_file(doctor, default="quickstart")
    doctor.add_argument(
        "--for",
        dest="service",
        choices=["buffer", "reward", "searcher", "trainer"],
        help="what this machine is for (default: every service that is installed here)",
    )
    doctor.add_argument("--check", action="append", default=[], metavar="NAME", help="only this one: gpu, disk, ...")
    doctor.add_argument("--gpus", type=int, metavar="N", help="how many GPUs should be seen here, no more and no fewer")
    doctor.set_defaults(command="tba_cli.commands.doctor:doctor_command")


def _add_config_file(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    help = "recipe, as the services read it" + ("" if default is None else f" (default: {default})")
    parser.add_argument("--config", required=default is None, default=default, metavar="FILE", help=help)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, as store.url=s3://bucket/prefix"
    )


def _add_prompts(commands: Subparsers) -> None:
    prompts = commands.add_parser("prompts", help="upload the prompts of a run")
    kinds = prompts.add_subparsers(metavar="WHAT", required=True)
    upload = kinds.add_parser("upload", help="upload a file; it is safe to repeat")
    upload.add_argument(
        "file", metavar="FILE", type=Path, help='JSONL, rows of {"prompt_id", "task", "text", "data", "split"}'
    )
    upload.add_argument("--dry-run", action="store_true", help="check every row, show three prompts, upload nothing")
    add_target(upload)
    upload.set_defaults(command="tba_cli.commands.prompts:upload_command")


def _add_ledger(commands: Subparsers) -> None:
    ledger = commands.add_parser("ledger", help="check what each optimizer step consumed")
    kinds = ledger.add_subparsers(metavar="WHAT", required=True)
    check = kinds.add_parser("check", help="check that the active lineage has every step exactly once")
    add_target(check)
    check.set_defaults(command="tba_cli.commands.report:check_command")


def _add_buffer(commands: Subparsers) -> None:
    buffer = commands.add_parser("buffer", help="save the rollouts of a run, and begin another one with them")
    kinds = buffer.add_subparsers(metavar="WHAT", required=True)
    save = kinds.add_parser("save", help="save what is stored; the run may be in progress or over")
    save.add_argument("name", metavar="NAME", help="name of the snapshot; no other of this run may have it")
    add_target(save)
    save.set_defaults(command="tba_cli.commands.buffer:save_command")
    load = kinds.add_parser("load", help="begin a run that stores nothing yet with a snapshot")
    load.add_argument("source", metavar="RUN/NAME", help="the snapshot, in the store of the run")
    load.add_argument("--version", metavar="VERSION", help="fork: rollouts up to the publication of this version")
    add_target(load)
    load.set_defaults(command="tba_cli.commands.buffer:load_command")
    accept = kinds.add_parser("accept-loss", help="continue without the acknowledged changes that Redis has lost")
    add_target(accept)
    accept.add_argument("--reason", metavar="TEXT", help="kept in the audit")
    accept.set_defaults(command="tba_cli.commands.buffer:accept_loss_command")


def _add_export(commands: Subparsers) -> None:
    export = commands.add_parser("export", help="write a version of a run as a Hugging Face folder with a model card")
    add_target(export)
    export.add_argument(
        "--version", default="last", metavar="VERSION", help="LINEAGE-STEP, start, best, or last (default)"
    )
    export.add_argument("--recipe", metavar="RECIPE", help="recipe of the run; needed with --url")
    export.add_argument("--out", metavar="DIR", required=True, help="folder to write; must not exist, or be empty")
    export.add_argument(
        "--adapter", action="store_true", help="the LoRA adapter alone, as peft and vLLM read it, in place of the model"
    )
    export.set_defaults(command="tba_cli.commands.export:export_command")


def _add_evaluate(commands: Subparsers) -> None:
    evaluate = commands.add_parser(
        "evaluate", help="the published evaluation of a task: generate, score, measure, compare"
    )
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
    evaluate.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, as eval.published.num_prompts=50"
    )
    take(evaluate, "token_file")
    _add_loudness(evaluate)
    evaluate.set_defaults(command="tba_cli.commands.evaluate:evaluate_command")


def _add_reports(commands: Subparsers) -> None:
    table = commands.add_parser("table", help="compare finished runs in a Markdown table")
    table.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="folders of finished runs")
    table.set_defaults(command="tba_cli.commands.report:table_command")
