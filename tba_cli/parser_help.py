"""The examples at the end of every --help, and a walk through all commands of a parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "": """\
tba demo                          # train a small model on this machine, from nothing
tba run recipes/quickstart.toml   # the same as a recipe, to be changed
tba init mytask                   # begin with a task of your own""",
        "run": """\
tba run quickstart                # a recipe that ships with tba
tba run my.toml --resume          # continue where it stopped
tba run --fork quickstart@1-40 --run-name warmer --set objective.beta=0.1""",
        "demo": """\
tba demo
tba demo --seed 1 --set trainer.num_steps=100""",
        "init": """\
tba init mytask
tba init mytask --folder tasks/first""",
        "score": """\
tba score examples.jsonl --recipe mytask.toml""",
        "status": """\
tba status                        # the newest run under runs/
tba status quickstart-seed0 --follow
tba status --url https://buffer:8700 --token-file operator.token --json""",
        "pause": """\
tba pause
tba pause --reason "the judge is down" quickstart-seed0""",
        "resume": """\
tba resume
tba resume --reason "the judge is back" quickstart-seed0""",
        "stop": """\
tba stop
tba stop --reason "good enough" quickstart-seed0""",
        "rollback": """\
tba rollback                      # show the checkpoints
tba rollback --step 450 --reason "the reward fell"
tba rollback --step 450 quickstart-seed0""",
        "set": """\
tba set                           # show them
tba set learning_rate=1e-4 --reason "spikes"
tba set 'beta={kind="linear", value=0.1, final=0.01, steps=400}' quickstart-seed0""",
        "scale": """\
tba scale                         # show how many there are
tba scale 4 --reason "the night is cheap"
tba scale recipe quickstart-seed0""",
        "config check": """\
tba config check my.toml
tba config check my.toml --offline --json""",
        "config show": """\
tba config show quickstart
tba config show my.toml --set trainer.num_steps=50""",
        "config schema": """\
tba config schema > recipe.schema.json""",
        "sizing": """\
tba sizing my.toml
tba sizing gsm8k --set model.path=Qwen/Qwen2.5-7B --gpu-memory-gib 40""",
        "data prepare": """\
tba data prepare quickstart
tba data prepare my.toml --set model.path=models/small""",
        "setup": """\
tba setup --config recipe.toml --create-bucket --prepare
tba setup --config recipe.toml --only models --pull""",
        "model pull": """\
tba model pull --config recipe.toml --for trainer
tba model pull --config recipe.toml --for searcher --wait-s 60""",
        "doctor": """\
tba doctor                        # for the recipe quickstart
tba doctor --config recipe.toml --for searcher --gpus 1
tba doctor --config recipe.toml --check disk --json""",
        "prompts upload": """\
tba prompts upload prompts.jsonl
tba prompts upload more.jsonl quickstart-seed0 --dry-run""",
        "ledger check": """\
tba ledger check
tba ledger check quickstart-seed0 --json""",
        "view": """\
tba view seed0                    # without a name: the newest run under runs/
tba view --url https://buffer:8700 --token-file operator.token""",
        "rollouts list": """\
tba rollouts list quickstart-seed0 --max-reward 0 --contains "I don't know" --limit 20
tba rollouts list quickstart-seed0 --id 0123456789abcdef0123456789abcdef""",
        "rollouts export": """\
tba rollouts export quickstart-seed0 --out good.parquet --min-reward 1 --from-version 1-100
tba rollouts export quickstart-seed0 --out all.parquet""",
        "rescore": """\
tba rescore --wait
tba rescore quickstart-seed0 --only failed
tba rescore --show --json""",
        "buffer save": """\
tba buffer save before-change
tba buffer save end quickstart-seed0""",
        "buffer load": """\
tba buffer load quickstart/before-change new-run
tba buffer load quickstart/before-change --version 1-40""",
        "buffer accept-loss": """\
tba buffer accept-loss
tba buffer accept-loss --reason "the disk was replaced" quickstart-seed0""",
        "weights list": """\
tba weights list quickstart-seed0
tba weights list --url https://buffer:8700 --token-file operator.token --recipe recipe.toml
tba weights list --recipe recipe.toml --json    # from the store alone""",
        "weights gc": """\
tba weights gc --dry-run
tba weights gc quickstart-seed0
tba weights gc --recipe recipe.toml --run-is-over""",
        "export": """\
tba export quickstart-seed0 --out model
tba export quickstart-seed0 --version best --out model""",
        "evaluate": """\
tba evaluate my.toml              # the starting model
tba evaluate quickstart-seed0 --compare start best    # answers before and after, side by side
tba evaluate my.toml --model model --set eval.published.num_prompts=50""",
        "table": """\
tba table runs/quickstart-seed0 runs/quickstart-seed1""",
    }
)
"""The words of a command -> one to three examples, a line each."""
WITHOUT_JSON = frozenset(
    {
        # their results are files of the run or evaluation, which they name; what they print is progress
        *("run", "demo", "data prepare", "setup", "model pull"),
        # JSON in any case
        *("config show", "config schema"),
    }
)
"""The commands that do not take --json."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of tba, or a group of them."""

    words: str
    """Behind `tba`; empty for tba itself."""
    help: str
    """One line."""
    parser: argparse.ArgumentParser

    @property
    def is_group(self) -> bool:
        """Whether commands stand below it."""
        return any(isinstance(action, argparse._SubParsersAction) for action in self.parser._actions)


class _Formatter(argparse.HelpFormatter):
    """Fills the description, and keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "examples:\n" in text:
            return text
        return super()._fill_text(text, width, indent)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """Yield the parser of tba and that of every command, in their order."""
    yield from _below(Command("", parser.description or "", parser))


def _below(command: Command) -> Iterator[Command]:
    yield command
    for action in command.parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, parser in action.choices.items():
                yield from _below(Command(f"{command.words} {name}".lstrip(), helps.get(name, ""), parser))


TARGET = ("url", "run_dir", "token_file", "ca_file")
"""The options of tba itself that name a run and its service."""


def global_options() -> argparse.ArgumentParser:
    """Return the parser of the options that stand once, for all commands."""
    options = argparse.ArgumentParser(prog="tba", add_help=False, allow_abbrev=False)
    options.add_argument("--url", metavar="URL", help="address of the buffer service")
    options.add_argument("--run-dir", metavar="DIR", help="folder of a run that `tba run` started here")
    options.add_argument("--token-file", metavar="FILE", help="file with the operator token, or tokens file; -: stdin")
    options.add_argument("--ca-file", metavar="FILE", help="authorities to trust for an https address (tls.ca_file)")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return options


def take(parser: argparse.ArgumentParser, *names: str) -> None:
    """Let a command take options of tba itself; it refuses the others, but for --debug."""
    parser.set_defaults(takes=(*(parser.get_default("takes") or ()), *names))


def flags_taken(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of tba itself that a command takes, but for --debug."""
    return [f"--{name.replace('_', '-')}" for name in parser.get_default("takes") or ()]


def add_help(parser: argparse.ArgumentParser) -> None:
    """Let the --help of every command begin with what it does and end with its examples, and most take --json.

    Raises:
        KeyError: a command has no examples.
    """
    for command in commands_of(parser):
        if not (command.is_group or command.words in WITHOUT_JSON):
            take(command.parser, "json")
        command.parser.formatter_class = _Formatter
        command.parser.description = command.help
        taken = flags_taken(command.parser)
        also = [f"also {' '.join(taken)} (tba --help)", ""] if taken else []
        command.parser.epilog = "\n".join([*also, "examples:", *(f"  {line}" for line in examples_of(command))])


def examples_of(command: Command) -> list[str]:
    """Return the examples of a command; of a group of commands, the first one of each."""
    if command.is_group and command.words:
        return [EXAMPLES[each.words].splitlines()[0] for each in _below(command) if each is not command]
    return EXAMPLES[command.words].splitlines()
