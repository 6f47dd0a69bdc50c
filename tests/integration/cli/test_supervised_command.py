"""`tba sft` and `tba train-reward`: what is made and in which order, what is refused, how a training goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba.config import load_recipe
from tba.config.supervised import REPORT_FILE, origin_digest
from tba.errors import ChildError, ConfigError
from tba.weights import sha256_of_file
from tba_cli.child_processes import follow_program
from tba_cli.console import Console
from tba_cli.doctor.checks.recipe import RecipeChecks
from tba_cli.doctor.target import target_of
from tba_cli.main import main
from tba_cli.resolve import with_absolute_paths
from tba_cli.setup import prepare, supervised
from tests.support.waits import until

NEW = {"hidden_size": 16, "num_layers": 1, "num_heads": 1, "max_length_tokens": 32, "vocab_size": 300}
SFT = {"dataset": "rows.jsonl", "prompt": "{q}", "response": "{a}", "num_steps": 4, "max_length_tokens": 32}
PAIRS = {"dataset": "rows.jsonl", "prompt": "{q}", "chosen": "{a}", "rejected": "{b}", "num_steps": 4}


def recipe_file(place: Path, **changes: Any) -> str:
    """Write the recipe of a policy and a judge, and their rows."""
    rows = [{"q": f"{n}+1=", "a": str(n + 1), "b": str(n)} for n in range(8)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    part = {"task": "t", "texts": ["x"]}
    document = {
        "run": {"name": "r"},
        "model": {"path": "models/policy"},
        "data": {"train": part, "heldout": part},
        "local": {"stop_timeout_s": 20},
        "sft": [{"new_model": NEW, **SFT}, {"base": "models/policy", "path": "models/victim", **SFT}],
        "reward_training": [{"base": "models/policy", "path": "models/judge", **PAIRS}],
        **changes,
    }
    (place / "recipe.json").write_text(json.dumps(document))
    return "recipe.json"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a program that only writes the folder in the place of the trainer's; return the folders as they are made."""
    folders: list[str] = []

    def program(module: str, words: list[str], *, on_progress: Callable[[dict[str, Any]], None], **_: Any) -> None:
        given = dict(zip(words[1::2], words[2::2], strict=True))
        recipe = load_recipe(given["--config"], environ={})
        items = recipe.sft if words[0] == "sft" else recipe.reward_training
        section, out = items[int(given["--item"])], Path(given["--out"])
        on_progress({"step": 4, "num_steps": 4, "loss": 0.5, "eta_s": 0.0})
        out.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            (out / name).write_text("{}")
        report = {
            "settings": section.deciding(),
            "examples_sha256": sha256_of_file(Path(given["--examples"])),
            "base_origin": origin_digest(section.base),
            "num_examples": 7,
            "num_left_out": {"too_long": 1},
            "num_heldout_left_out": {"too_long": 2},
            "num_steps": 4,
            "metrics": {"loss": 0.5, "heldout_loss": 0.25},
        }
        (out / REPORT_FILE).write_text(json.dumps(report))
        folders.append(out.name)

    monkeypatch.setattr(supervised, "follow_program", program)
    return folders


# ---- What is made ---------------------------------------------------------------------------------------------------


def test_what_is_missing_is_made_in_order_once(
    place: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(place)
    assert main(["train-reward", recipe]) == 2
    assert "reward_training.0: there is no model at its base models/policy; run `tba data prepare`" in (
        capsys.readouterr().err
    )
    assert (main(["sft", recipe]), main(["train-reward", recipe])) == (0, 0)
    assert trained == ["policy", "victim", "judge"]
    output = capsys.readouterr().out
    assert "models/policy: 4 steps on 8 examples; held out: 0" in output
    assert "step 4/4  loss 0.5\n" in output
    assert "trained, 4 steps on 7 examples (left out: 1 too_long, 2 too_long of the held-out ones): loss 0.5" in output
    assert ": loss 0.5  heldout_loss 0.25\n" in output

    assert main(["sft", recipe]) == 0
    assert capsys.readouterr().out.count(": here already") == 2
    assert main(["sft", recipe, "--item", "models/victim", "--again"]) == 0
    assert trained == ["policy", "victim", "judge", "victim"]


def test_examples_that_a_killed_command_has_left_are_deleted(
    place: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    recipe = recipe_file(place)
    for words in (["--item", "models/policy"], []):  # to train it, and to compare it
        left = place / f"{supervised.EXAMPLES_PREFIX}left"
        left.mkdir()
        (left / "lock").touch()
        assert main(["sft", recipe, *words]) == 0
        assert not list(place.glob(f"{supervised.EXAMPLES_PREFIX}*"))
    assert trained == ["policy", "victim"]


def test_labels_that_no_example_has_are_named_before_the_training(
    place: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = supervised.follow_program
    counts = {"num_of_label": {"good": 0, "bad": 5, "odd": 0}, "num_heldout_of_label": {"good": 0, "bad": 0, "odd": 0}}

    def with_counts(module: str, words: list[str], *, on_progress: Callable[[dict[str, Any]], None], **_: Any) -> None:
        on_progress({"step": 0, "num_steps": 4, **counts})
        assert "no example has the label 'good', 'odd' (good 0, bad 5, odd 0): the" in capsys.readouterr().out
        program(module, words, on_progress=on_progress)  # pyright: ignore[reportCallIssue]

    monkeypatch.setattr(supervised, "follow_program", with_counts)
    assert main(["sft", recipe_file(place), "--item", "models/policy"]) == 0
    assert "no held-out example has the label" not in capsys.readouterr().out, "none is there"
    assert trained == ["policy"]


def test_other_settings_and_other_examples_are_refused(
    place: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(place)
    assert main(["sft", recipe]) == 0
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"q": "9+1=", "a": "10"}\n')
    assert main(["sft", recipe]) == 2
    assert "models/policy was trained on other examples (sha256 " in (error := capsys.readouterr().err)
    assert "remove that folder or train it anew (--again" in error
    (place / "rows.jsonl").unlink()
    assert main(["sft", recipe]) == 0, "what the models were made of may be gone"
    assert "its examples were not compared, since rows.jsonl is not here" in capsys.readouterr().out
    recipe = recipe_file(place, sft=[{"new_model": NEW, **SFT, "seed": 1}])
    assert main(["sft", recipe]) == 2
    assert "was trained with seed = 0, and the recipe asks for 1; remove" in capsys.readouterr().err
    assert main(["sft", recipe, "--again"]) == 0
    assert trained == ["policy", "victim", "policy"]


def test_a_model_stays_until_the_one_that_replaces_it_is_whole(
    place: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(place)
    assert main(["sft", recipe, "--item", "models/policy"]) == 0
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"q": "9+1="}\n')
    assert main(["sft", recipe, "--item", "models/policy", "--again"]) == 2
    assert "rows.jsonl, line 9: column 'a' is missing" in capsys.readouterr().err
    assert (place / "models/policy" / REPORT_FILE).exists()
    assert trained == ["policy"]


def test_a_model_whose_base_was_trained_anew_is_refused(
    place: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (main(["sft", recipe_file(place)]), main(["train-reward", "recipe.json"])) == (0, 0)
    others = [{"new_model": NEW, **SFT, "seed": 1}, {"base": "models/policy", "path": "models/victim", **SFT}]
    recipe = recipe_file(place, sft=others)
    assert main(["sft", recipe, "--item", "models/policy", "--again"]) == 0
    assert main(["train-reward", recipe]) == 2
    message = "models/judge was trained from models/policy before that was trained anew; remove that folder or train"
    assert message in capsys.readouterr().err
    recipe = recipe_file(place)
    assert main(["sft", recipe, "--item", "models/policy", "--again"]) == 0
    assert main(["train-reward", recipe]) == 0, "the same training makes the same base"
    assert trained == ["policy", "victim", "judge", "policy", "policy"]


def test_a_base_that_nothing_makes_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_file(place, sft=[{"base": "gpt2", **SFT}], reward_training=[])
    assert main(["data", "prepare", recipe]) == 2
    assert "sft.0: there is no model at its base gpt2; give a folder in Hugging Face format" in capsys.readouterr().err


def test_a_folder_of_a_person_is_taken_as_it_is(
    place: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(place)
    (place / "models/policy").mkdir(parents=True)
    (place / "models/policy/config.json").touch()
    assert main(["sft", recipe]) == 0
    assert "models/policy: a folder of your own (no supervised.json in it)" in capsys.readouterr().out
    assert trained == ["victim"]
    assert main(["sft", recipe, "--again"]) == 2
    assert "--again: models/policy holds no supervised.json, so it is a folder of your own" in capsys.readouterr().err
    assert (place / "models/policy/config.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sft", "--item", "models/judge"), "'models/judge' is the path of no [[sft]]; the paths are models/policy, "),
        (("train-reward", "--item", "x"), "'x' is the path of no [[reward_training]]; the paths are models/judge"),
    ],
)
def test_an_item_that_there_is_not_is_named(
    place: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *flags = words
    assert main([command, recipe_file(place), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_without_items_says_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", recipe_file(place, sft=[], reward_training=[])]) == 2
    assert "recipe.json has no [[sft]], so there is nothing to train" in capsys.readouterr().err


def test_a_run_makes_what_is_made_at_the_start_and_asks_for_the_rest(
    place: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(_module: str, words: list[str]) -> str:
        Path(words[3]).mkdir(parents=True)
        (Path(words[3]) / "config.json").touch()
        trained.append(words[1])
        return ""

    monkeypatch.setattr(prepare, "run_program", make)
    base: dict[str, Any] = {"path": "models/base", "kind": "model", "maker": "llama"}
    policy = {"base": "models/base", **SFT, "at_start": True}

    def start(**changes: Any) -> None:
        path = recipe_file(place, **{"prepare": [base], "sft": [policy], "reward_training": [], **changes})
        prepare.prepare_at_start(load_recipe(path, environ={}), Console("quiet"))

    with pytest.raises(ConfigError, match=r"needs models/base \(model\), not there yet; run `tba data prepare`"):
        start()
    assert not trained, "nothing is trained before everything is there"
    base["at_start"] = True
    judge = {"base": "models/policy", "path": "models/judge", **PAIRS, "at_start": True}
    start(reward_training=[judge])
    assert trained == ["llama", "policy", "judge"]
    (place / "models/base").rename(place / "gone")
    start(reward_training=[judge])
    assert trained == ["llama", "policy", "judge"], "the base has served"


def test_setup_stores_what_was_trained_and_notices_other_settings(
    place: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    store = {"store": {"url": f"file://{place}/store"}}
    setup = ["setup", "--only", "models", "--config"]
    recipe = recipe_file(place, **store)
    assert main([*setup, recipe]) == 2
    assert "models/policy is neither here nor in file:" in (error := capsys.readouterr().err)
    assert "`tba setup --prepare` fetches or makes it" in error
    assert main(["sft", recipe, "--item", "models/policy"]) == 0
    assert main([*setup, recipe]) == 0, "neither victim nor judge is named by a scorer"
    assert trained == ["policy"]
    (place / "models").rename(place / "elsewhere")
    capsys.readouterr()
    assert main([*setup, recipe]) == 0
    assert "model policy is in file:" in capsys.readouterr().out
    recipe = recipe_file(place, sft=[{"new_model": NEW, **SFT, "seed": 1}], reward_training=[], **store)
    assert main([*setup, recipe]) == 2
    assert "store was trained with seed = 0, and the recipe asks for 1; remove" in capsys.readouterr().err


def test_config_check_says_what_a_run_makes_and_what_has_other_settings(place: Path, trained: list[str]) -> None:
    def check(**changes: Any) -> dict[str, str]:
        path = recipe_file(place, sft=[{"new_model": NEW, **SFT, **changes}], reward_training=[])
        recipe = with_absolute_paths(load_recipe(path, environ={}))
        target = target_of(recipe, service=None)
        checks = RecipeChecks(recipe, offline=True, full=False, try_scorers=None, file=Path(path))
        results = [*checks.check_prompts(target), *checks.check_model(target), *checks.check_tokenizer(target)]
        return {result.code: f"{result.level} {result.found}; {result.fix}" for result in results}

    found = check(at_start=True)
    assert found["prompts"].startswith("ok 1 to train on, 1 held out")
    assert "policy (model.path) is not there yet; `tba run` fetches or makes it" in found["model"]
    assert "policy is not there yet; `tba run` fetches or makes it" in found["tokenizer"]
    assert re.match(
        "fail the recipe needs .*policy .model., not there yet; run `tba data prepare`", check()["prepared"]
    )
    assert main(["sft", "recipe.json"]) == 0
    assert "policy was trained with seed = 0, and the recipe asks for 1" in check(seed=1)["prepared"]


# ---- The program ----------------------------------------------------------------------------------------------------


TALKER = """
import os, signal, sys
print("a warning", file=sys.stderr)
print('progress: {"step": 1}', file=sys.stderr)
if sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
print("last words", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def follow(word: str) -> tuple[list[dict[str, Any]], list[str]]:
    progress: list[dict[str, Any]] = []
    lines: list[str] = []
    try:
        follow_program(
            "talker",
            [word],
            on_progress=progress.append,
            on_line=lines.append,
            num_threads=1,
            gpus=None,
            stop_timeout_s=5,
        )
    finally:
        assert progress == [{"step": 1}]
        assert lines == ["a warning", "last words"][: 2 if word == "0" else 1 if word.isdigit() else 0]
    return progress, lines


def test_what_a_long_program_says_comes_at_once_and_its_last_words_are_the_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "talker.py").write_text(TALKER)
    monkeypatch.setenv("PYTHONPATH", str(place))
    follow("0")
    with pytest.raises(ConfigError, match=r"^last words$"):
        follow("2")
    with pytest.raises(ChildError, match=r"^last words$"):
        follow("1")
    with pytest.raises(ChildError, match=r"a warning; it was ended by signal 9 \(SIGKILL\)"):
        follow("dies")


SAVER = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("checkpoint").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path("begun").touch()
time.sleep(3600)
"""
COMMAND = """
import sys
from tba_cli import child_processes, main
from tba_cli.setup import supervised
follow = child_processes.follow_program
supervised.follow_program = lambda module, words, **options: follow("saver", [], **options)
sys.exit(main.main(["sft", "recipe.json"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_may_end_with_a_checkpoint_when_the_command_is_ended(place: Path, number: int) -> None:
    recipe_file(place)
    (place / "saver.py").write_text(SAVER)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *sys.path])}
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until("the training has begun", lambda: (place / "begun").exists() or command.poll() is not None)
        command.send_signal(number)
        output, _ = command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 130, output
    assert "models/policy: interrupted; the same command goes on from the last checkpoint" in output
    assert (place / "checkpoint").exists()


def test_the_trainer_makes_a_model(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy = {"new_model": NEW, **SFT, "learning_rate": 1e-3}
    recipe = recipe_file(place, sft=[policy], reward_training=[])
    assert main(["sft", recipe]) == 0, capfd.readouterr().err
    assert "models/policy: trained, 4 steps on 8 examples: loss " in capfd.readouterr().out
    files = {file.name for file in (place / "models/policy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", REPORT_FILE} <= files
    assert main(["sft", recipe]) == 0
    assert "models/policy: here already" in capfd.readouterr().out
