"""Every flag of `tba`, in one place that imports nothing heavy: `tba --help` answers at once."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import tba

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = "Post-train language models with Trajectory Balance with Asynchrony."


def build_parser() -> argparse.ArgumentParser:
    """The parser; `args.command` is `module:function`, which takes the parsed arguments and returns an exit code."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(prog="tba", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"tba {tba.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands, common)
    _add_control(commands, common)
    _add_config(commands, common)
    _add_prompts(commands, common)
    _add_ledger(commands, common)
    _add_reports(commands, common)
    return parser


def _add_run(commands: Subparsers, common: argparse.ArgumentParser) -> None:
    run = commands.add_parser("run", parents=[common], help="run a recipe on this machine: Redis and every service")
    _add_recipe(run)
    run.add_argument("--run-name", metavar="NAME", help="name of the run, instead of run.name of the recipe")
    run.add_argument("--seed", type=int, metavar="N", help="seed of the run, instead of run.seed of the recipe")
    again = run.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with the run in its folder, from its checkpoint")
    again.add_argument("--fresh", action="store_true", help="delete the folder of this run first")
    loud = run.add_mutually_exclusive_group()
    loud.add_argument("--quiet", action="store_true", help="only the result and errors")
    loud.add_argument("--verbose", action="store_true", help="show every log line of the services, not only warnings")
    run.set_defaults(command="tba.cli.run:run_command")


def _add_control(commands: Subparsers, common: argparse.ArgumentParser) -> None:
    helps = {
        "status": "show state, components, waits and evaluations of a run",
        "pause": "pause a run: no new leases, no new batches",
        "resume": "let a paused run go on",
        "stop": "end a run after the step in progress, with its last checkpoint and evaluation",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, parents=[common], help=text)
        _add_target(command)
        command.add_argument("--json", action="store_true", help="print JSON")
        if name != "status":
            command.add_argument("--reason", metavar="TEXT", help="shown to people who look at the run")
        command.set_defaults(command=f"tba.cli.control:{name}_command")


def _add_config(commands: Subparsers, common: argparse.ArgumentParser) -> None:
    config = commands.add_parser("config", help="check, show or describe recipes")
    kinds = config.add_subparsers(metavar="WHAT", required=True)
    for name, text in {"check": "check a recipe", "show": "print the resolved recipe as JSON"}.items():
        command = kinds.add_parser(name, parents=[common], help=text)
        _add_recipe(command)
        command.set_defaults(command=f"tba.cli.config:{name}_command")
    schema = kinds.add_parser("schema", parents=[common], help="print the JSON schema of recipes")
    schema.set_defaults(command="tba.cli.config:schema_command")


def _add_prompts(commands: Subparsers, common: argparse.ArgumentParser) -> None:
    prompts = commands.add_parser("prompts", help="upload prompts to a run")
    kinds = prompts.add_subparsers(metavar="WHAT", required=True)
    upload = kinds.add_parser("upload", parents=[common], help="upload a JSONL file; the same file again is accepted")
    upload.add_argument("file", metavar="FILE.jsonl", help='lines of {"prompt_id", "task", "text", "data", "split"}')
    _add_target(upload)
    upload.set_defaults(command="tba.cli.prompts:upload_command")


def _add_ledger(commands: Subparsers, common: argparse.ArgumentParser) -> None:
    ledger = commands.add_parser("ledger", help="check what each optimizer step consumed")
    kinds = ledger.add_subparsers(metavar="WHAT", required=True)
    check = kinds.add_parser("check", parents=[common], help="along the living lineage every step exactly once")
    _add_target(check)
    check.set_defaults(command="tba.cli.ledger:check_command")


def _add_reports(commands: Subparsers, common: argparse.ArgumentParser) -> None:
    report = commands.add_parser("report", parents=[common], help="make summary.json and report.html of a run again")
    report.add_argument("run_dir", metavar="RUN_DIR", help="folder of a finished run")
    report.set_defaults(command="tba.cli.reports:report_command")
    table = commands.add_parser("table", parents=[common], help="compare finished runs in a Markdown table")
    table.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="folders of finished runs")
    table.set_defaults(command="tba.cli.reports:table_command")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="TOML file, for example recipes/quickstart.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, for example trainer.num_steps=50"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", metavar="URL", help="address of the buffer service")
    where.add_argument("--run-dir", metavar="DIR", help="folder of a run that `tba run` started here")
    where.add_argument("run", metavar="RUN", nargs="?", help="name of a run under runs/; default: the newest")
    parser.add_argument("--token-file", metavar="FILE", help="file with the operator token, or the tokens file itself")
