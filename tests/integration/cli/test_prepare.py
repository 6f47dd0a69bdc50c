"""`tba data prepare`, from the hub and by a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tba.api import Prompt
from tba.config import parse_recipe
from tba.config.data import PrepareItem
from tba.errors import ConfigError
from tba_cli.child_processes import run_program
from tba_cli.console import Console
from tba_cli.setup.prepare import endless_warning, get_items
from tests.support.buffer import SERVICE_PATHS
from tests.support.hub_server import HubServer, commit_of
from tests.support.waits import until

# ---- `tba data prepare` against a hub on loopback -------------------------------------------------------------------


def write_dataset(folder: Path) -> None:
    """A data set as the hub stores it: Parquet files by split, and a README with its configuration."""
    import pyarrow
    from pyarrow import parquet

    (folder / "main").mkdir(parents=True)
    for split, numbers in (("train", range(46)), ("test", range(46, 62))):
        rows = [{"question": f"Tom has {n} apples and buys 1 more.", "answer": f"{n}+1\n#### {n + 1}"} for n in numbers]
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, folder / "main" / f"{split}-00000-of-00001.parquet")
    files = "".join(f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    import torch
    from safetensors.torch import load_file

    from tests.support.tiny_reward_models import save_reward_model

    place = tmp_path_factory.mktemp("hub")
    write_dataset(place / "data")
    save_reward_model(place / "whole")
    save_reward_model(place / "pickled", seed=1)
    torch.save(load_file(place / "pickled" / "model.safetensors"), place / "pickled" / "pytorch_model.bin")
    (place / "pickled" / "model.safetensors").unlink()
    for file in place.joinpath("pickled").glob("tokenizer*"):
        file.unlink()
    (place / "whole" / "pytorch_model.bin").write_bytes(b"not wanted where there are safetensors")
    repositories = {
        "models/org/whole": place / "whole",
        "models/org/pickled": place / "pickled",
        "models/org/gated": place / "whole",
        "datasets/org/gsm8k": place / "data",
    }
    server = HubServer(repositories, gated=frozenset({"models/org/gated"}))
    yield server
    server.close()


def prepare(place: Path, hub_url: str, items: list[dict[str, Any]]) -> tuple[int, str]:
    """Run the command in a folder; returns exit code and output."""
    gold = {"answer": {"column": "answer", "extract": "after", "marker": "####"}}
    part = {"task": "gsm8k", "dataset": "data/gsm8k", "subset": "main", "template": "{question}\n", "data": gold}
    document: dict[str, Any] = {"run": {"name": "r"}, "model": {"path": "models/whole"}, "prepare": items}
    document["data"] = {"sets": [{**part, "train": "train", "heldout": "test"}]}
    document["searcher"] = {"max_prompt_tokens": 96, "max_response_tokens": 16}
    (place / "recipe.json").write_text(json.dumps(document))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS)), "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub_url}
    environ |= {"HF_HOME": str(place / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
    command, nothing = [sys.executable, "-m", "tba_cli.main", "data", "prepare", "recipe.json"], subprocess.DEVNULL
    done = subprocess.run(command, cwd=place, env=environ, stdin=nothing, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


DATA = {"path": "data/gsm8k", "kind": "dataset", "hub": "org/gsm8k"}
WHOLE = {"path": "models/whole", "kind": "model", "hub": "org/whole"}
PICKLED = {"path": "models/pickled", "kind": "model", "hub": "org/pickled", "tokenizer": "org/whole"}


def test_everything_is_fetched_and_converted_once(tmp_path, hub):
    code, output = prepare(tmp_path, hub.url, [DATA, WHOLE, PICKLED])
    assert code == 0, output
    assert f"models/whole: model org/whole, fetched, commit {commit_of('models/org/whole')[:12]}" in output
    assert "models/pickled: model org/pickled, fetched, commit " in output
    assert "46 prompts of split train; the first:" in output
    pickled = {file.name for file in (tmp_path / "models/pickled").iterdir()}
    assert {"model.safetensors", "tokenizer.json"} <= pickled
    assert not {name for name in pickled if name.endswith(".bin")}, "no pickle stays"
    assert not (tmp_path / "models/whole/pytorch_model.bin").exists()

    before = len(hub.downloads)
    code, output = prepare(tmp_path, hub.url, [DATA, WHOLE, PICKLED])
    assert (code, output.count("here already"), len(hub.downloads)) == (0, 3, before)


def test_what_the_hub_keeps_behind_a_licence_is_said_in_a_sentence(tmp_path, hub):
    """What it has not, and a hub that is away, are said by the same function to `tba run` (test_local_run.py)."""
    code, output = prepare(tmp_path, hub.url, [{**WHOLE, "hub": "org/gated"}])
    assert (code, "error: model org/gated could not be fetched (GatedRepoError: " in output) == (2, True), output
    assert "Traceback" not in output


def test_a_file_of_another_size_than_the_hub_says_is_not_whole(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(hub, "lost_bytes", 1)
    code, output = prepare(tmp_path, hub.url, [WHOLE])
    assert (code, "was not fetched completely; run this command again" in output) == (2, True), output
    assert not (tmp_path / "models/whole").exists()


def test_what_cannot_be_fetched_says_what_to_do(tmp_path):
    item = PrepareItem(path=str(tmp_path / "m"), kind="model", manual="ask Ana")
    with pytest.raises(ConfigError, match=r"m \(model\) cannot be fetched: ask Ana"):
        get_items([item], Console("quiet"))


def test_turns_that_end_with_no_end_of_sequence_are_a_warning(tmp_path):
    from tba_cli.starter_models.convert import check
    from tests.support.tiny_reward_models import save_chat_model

    chat = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}|{% endfor %}"
    folder = save_chat_model(tmp_path / "m", chat=chat + "{% if add_generation_prompt %}<s>assistant: {% endif %}")
    asked = "<s>user: 4|<s>assistant: "
    prompts = [Prompt(prompt_id="p", task="t", text=asked, split="train")]

    def warning(**searcher):
        recipe = {"run": {"name": "r"}, "model": {"path": str(folder)}, "data": {"generator": "addition"}}
        reward = {"tasks": {"t": {"scorers": [{"kind": "exact"}]}}}
        return endless_warning(parse_recipe({**recipe, "reward": reward, "searcher": searcher}, where="test"), prompts)

    assert "ends turns with '|', which is none" in (warning() or "")
    assert warning(tasks={"t": {"stop": ["|"]}}) is None
    assert check(folder, ["4"])["endless"] is None, "the template is not used"
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", "<pad>"),
        ("generation_config.json", "eos_token_id", 1),
        ("config.json", "eos_token_id", 1),
    ):
        document = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**document, key: value}))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("|", "</s>"))
    assert warning() is None, "searchers end an answer at a special token that ends turns"
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        document = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: each for key, each in document.items() if "eos" not in key}))
    prompts = [prompts[0].model_copy(update={"text": "4"})]
    assert "none follows an answer" in (warning() or "")


def test_an_end_of_text_by_name_is_not_unknown(tmp_path):
    from tba_cli.starter_models.convert import check
    from tests.support.tiny_reward_models import save_chat_model

    path = save_chat_model(tmp_path / "m") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unk_token": "</s>"}))  # as Qwen has it
    found = check(tmp_path / "m", ["4 apples</s>", "\u4e2d"])
    assert (found["num_unknown_texts"], found["unknown"]) == (0, [])


# ---- The programs that `tba setup` and `tba data prepare` start -----------------------------------------------------


SLEEPER = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
path.with_suffix(".half").write_text(str(os.getpid()))
os.replace(path.with_suffix(".half"), path)
time.sleep(3600)
"""
PARENT = """
import pathlib, sys
from tba_cli import child_processes
class Told(child_processes.OrphanReaper):
    def add(self, pid):
        super().add(pid)
        pathlib.Path(sys.argv[1]).with_suffix(".told").touch()
child_processes.OrphanReaper = Told
child_processes.run_program("sleeper", sys.argv[1:])
"""
"""Says when the reaper knows the program: a kill before that leaves the program alone."""
TALKER = "import sys; print('out', sys.argv[1]); sys.exit('error: it went wrong' if sys.argv[1] == 'bad' else 0)"


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_program_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    pid_path = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pid_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    try:
        until("the program runs", pid_path.exists)
        until("the reaper knows it", pid_path.with_suffix(".told").exists)
        pid = int(pid_path.read_text())
        assert not is_gone(pid)
    finally:
        parent.kill()
        parent.wait()
    until("the program is gone", lambda: is_gone(pid))


def test_what_a_program_says_is_returned_or_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talker.py").write_text(TALKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_program("talker", ["good"]) == "out good\n"
    with pytest.raises(ConfigError, match=r"^it went wrong$"):
        run_program("talker", ["bad"])
