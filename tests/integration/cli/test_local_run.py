"""`tba run` with a real Redis and stand-ins for the services (local_fakes/): order, endings, cleanliness.

Every test starts the real command line in a process of its own, as a person would.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer, commit_of
from tests.support.local_workplace import DEADLINE_S, RECIPE, Workplace, prompt_line, wait_until

NOBODY = "http://127.0.0.1:9"
"""A hub that is not there."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    place = Workplace(tmp_path)
    yield place
    place.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, subprocess.CompletedProcess[str]]:
    """A run that made its starting model and went to the end; tests only look at it."""
    place = Workplace(tmp_path_factory.mktemp("finished"))
    words = ["--set", "model.path=made", "--set", 'model.warm_start.task="addition"']
    done = place.run("--verbose", *words)
    assert done.returncode == 0, done.stderr
    return place, done


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def last_words(text: str) -> list[str]:
    """The arguments of the command with which an error ends."""
    words = shlex.split(text.rpartition(": ")[2])
    assert words[:3] == [sys.executable, "-m", "tba_cli.main"]
    return words[3:]


def wait_for_step_2(place: Workplace) -> None:
    """A trainer that waits at step 2 has done it, and every child is up."""
    path = place.folder / "logs" / "trainer.log"
    wait_until("step 2", lambda: path.exists() and "step 2" in path.read_text())
    wait_until("both searchers", lambda: all("starts" in place.log(f"searcher-{i}") for i in range(2)))


def test_a_run_goes_from_recipe_to_summary_and_leaves_no_process(finished):
    place, done = finished
    assert done.stderr == ""
    assert "pass@1 sampled: 0.250 -> 0.500 on 8 held-out prompts" in done.stdout
    assert f"flat: It is. Try x.\nsummary: {place.folder}/summary.json" in done.stdout
    assert place.summary()["steps"] == 6
    assert place.summary()["first_step_s"] > 0
    assert json.loads((place.folder / "model" / "config.json").read_text()) == {"exported": True}
    assert not (place.folder / "endpoints.json").exists()
    assert place.children() == []
    config = json.loads((place.folder / "config.json").read_text())
    assert config["buffer"]["port"] > 0
    assert config["store"]["url"] == f"file://{place.folder}/store"
    line = "searcher-1 starts with threads 1 stdin ''"
    assert place.log("searcher-1").startswith(line)
    assert f"searcher-1  | {line}" in done.stdout
    assert list((place.folder / "redis").rglob("*appendonly*"))
    assert "Redis is now ready to exit, bye bye" in place.log("redis")
    assert (place.path / "made" / "config.json").exists()
    assert place.summary()["warm_start_s"] > 0


def test_a_locale_that_is_not_utf_8_stops_no_run(place):
    remedy = "Pr\u00fcfe: \u2265 1."
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = place.run(FAKE_REMEDY=json.dumps(remedy), **ascii_only)
    assert done.returncode == 0, done.stderr
    assert place.summary()["summary"]["remedy"] == remedy
    assert r"flat: It is. Pr\xfcfe: \u2265 1." in done.stdout  # the console replaces


def test_a_finished_run_is_neither_overwritten_nor_resumed(finished):
    place, _ = finished
    again = place.refused()
    assert "--fresh" in again.stderr
    assert "exists already" in again.stderr
    resumed = place.run("--resume")
    assert resumed.returncode == 0
    assert "nothing to resume" in resumed.stdout
    assert "pass@1 sampled: 0.250 -> 0.500" in resumed.stdout


def test_fresh_begins_again_and_quiet_prints_the_result_only(place):
    heldout = prompt_line("b", "heldout").replace("1+1", "2+2")  # another text: nothing to warn of
    (place.path / "prompts.jsonl").write_text(f"{prompt_line('a', 'train')}\n{heldout}\n")
    assert place.run(FAKE_TRAINER="die-at-2").returncode == 1
    done = place.run("--fresh", "--quiet", "--seed", "3", "--set", "sampling.prompts_per_batch=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pass@1 sampled")
    summary = place.summary()
    assert (summary["seed"], summary["num_starts"], summary["lineages"]) == (3, 1, 1)
    assert summary["warm_start_s"] is None


def test_a_trainer_that_is_killed_stops_the_run_with_the_way_to_resume_it(place):
    died = place.run(FAKE_TRAINER="die-at-2")
    assert died.returncode == 1
    assert died.stderr.count("\n") == 1
    assert died.stderr.startswith("error: trainer died (killed by SIGKILL)")
    assert "; resume with: " in died.stderr
    assert "trainer | about to die" in died.stdout
    assert place.children() == []
    resumed = place.tba(*last_words(died.stderr))
    assert resumed.returncode == 0, resumed.stderr
    summary = place.summary()
    assert (summary["steps"], summary["lineages"], summary["num_starts"]) == (6, 2, 2)
    assert summary["ledger_violations"] == []


def test_resume_keeps_the_recipe_of_the_start_except_what_is_set(place):
    died = place.run("--seed", "5", FAKE_TRAINER="die-at-2")
    assert died.returncode == 1
    # the recipe sets num_searchers alone; a resume elsewhere has the numbers of the machine where the run began
    assert re.search(r"^this machine: .* searcher.num_slots = 64, sampling.samples_per_insert = 1, ", died.stdout, re.M)
    assert "num_searchers" not in died.stdout
    recipe = json.loads((place.folder / "recipe.json").read_text())
    assert recipe["sampling"]["samples_per_insert"] == 1.0
    recipe["searcher"]["num_slots"] = 63
    (place.folder / "recipe.json").write_text(json.dumps(recipe))
    for words in (["--seed", "6"], ["--set", "run.seed=6"]):
        assert "run.seed was 5 when run 'demo' began, and cannot become 6" in place.refused("--resume", *words).stderr
    set_path = place.refused("--resume", "--set", "data.path=other.jsonl")
    assert "data.path was " in set_path.stderr
    assert "other.jsonl' within a run: set it back" in set_path.stderr
    fewer = place.run("--resume", "--set", "trainer.num_steps=1")
    assert (fewer.returncode, "has made 2 steps, and trainer.num_steps is 1" in fewer.stderr) == (2, True), fewer.stderr
    assert "resume with" not in fewer.stderr, "the same would be refused again"
    resumed = place.run("--resume", "--set", "trainer.num_steps=8")
    assert (resumed.returncode, "this machine" in resumed.stdout) == (0, False)
    assert json.loads((place.folder / "config.json").read_text())["searcher"]["num_slots"] == 63
    assert place.summary()["steps"] == 8
    assert place.summary()["seed"] == 5
    # the run is finished now: more steps are made, and everything else is refused
    for words in (["--seed", "6"], ["--set", "trainer.num_steps=7"], ["--set", "trainer.keep_versions=9"]):
        refused = place.refused("--resume", *words)
        assert "--seed" in words or "trainer.num_steps above 8" in refused.stderr
        assert place.summary()["steps"] == 8
    assert place.run("--resume", "--set", "trainer.num_steps=9", "--set", "trainer.max_train_s=5").returncode == 0
    assert (place.summary()["steps"], place.summary()["lineages"]) == (9, 3)


def test_changes_of_a_recipe_are_named_and_refused(place):
    died = place.run("--seed", "5", FAKE_TRAINER="die-at-2")
    assert last_words(died.stderr) == ["run", "recipe.toml", "--seed", "5", "--resume"]
    path = place.path / "recipe.toml"
    path.write_text(RECIPE.replace("num_steps = 6", "num_steps = 7").replace("120", "121"))
    refused = place.refused("--resume")
    assert "recipe.toml: trainer.num_steps was 6 when the run began, and is 7 now" in refused.stdout
    assert "recipe.toml: local.start_timeout_s was 120 when the run began, and is 121 now" in refused.stdout
    assert "recipe recipe.toml has changed since run 'demo' began (see above); begin it again with" in refused.stderr
    as_it_began = shlex.split(refused.stderr.rpartition(": ")[2])[-3:]
    assert place.tba(*as_it_began).returncode == 0
    assert (place.summary()["steps"], place.summary()["seed"]) == (6, 5)
    path.write_text(RECIPE)
    assert "cannot become 'bfloat16' within" in place.refused("--resume", "--set", "model.dtype=bfloat16").stderr
    began = place.folder / "recipe_file.json"
    for content in (None, "{", "[]"):
        began.unlink(missing_ok=True)
        if content is not None:
            began.write_text(content)
        assert f"{began} is missing or damaged" in place.refused("--resume").stderr


def test_nothing_of_an_older_run_is_deleted_when_the_new_one_cannot_start(finished):
    place, _ = finished
    (place.path / "tokens.json").write_text(json.dumps({"operator": "o" * 16, "trainer": "t" * 16}))
    cases = {"nowhere.json": "nowhere.json cannot be read", "tokens.json": "no token for the role 'searcher'"}
    for name, sentence in cases.items():
        refused = place.refused("--fresh", "--set", f"auth.tokens_file={name}")
        assert sentence in refused.stderr
        assert place.summary()["steps"] == 6


def test_a_failed_start_quotes_its_child_and_a_run_that_failed_can_be_resumed(place):
    failed = place.run(FAKE_TRAINER="error")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: trainer ended (exit code 2): the learning rate is silly [")
    log = place.folder / "logs" / "trainer.log"
    assert f"the learning rate is silly [{log}]; resume with: " in failed.stderr
    assert "the learning rate is silly" in log.read_text()
    failed = place.run("--resume", FAKE_TRAINER="fail")
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
    assert "the loss is not finite" in failed.stderr
    assert place.run("--resume").returncode == 0
    assert place.summary()["steps"] == 6


def test_a_start_that_was_interrupted_leaves_no_run(place):
    started = place.start(FAKE_REWARD="slow")
    wait_until("reward is waited for", lambda: place.folder.exists() and "tba_reward" in str(place.commands()))
    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=DEADLINE_S)
    assert (started.returncode, err) == (130, "")
    assert last_words(out) == ["run", "recipe.toml"]
    assert "training had not begun; start again with: " in out
    assert not (place.folder / "recipe.json").exists()


def test_a_scorer_that_did_not_start_ends_the_start_at_once_with_its_reason(place):
    done = place.run("--set", "local.start_timeout_s=100000", FAKE_REWARD="misspelt")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the reward service cannot score the task 'addition': scorer 'python': Value")
    assert "module graders has no function 'smae'" in done.stderr
    assert not (place.folder / "recipe.json").exists()


def test_a_service_that_is_slow_says_why_while_it_is_waited_for(place):
    done = place.run("--set", "local.start_timeout_s=15", FAKE_REWARD="slow")
    assert done.returncode == 2
    assert done.stdout.count("reward is not ready yet: addition: python: it is starting") == 1
    log = place.folder / "logs" / "reward.log"
    assert f"reward was not ready within 15 s (local.start_timeout_s); see {log}" in done.stderr


def test_a_run_outlives_the_reader_of_its_output(place):
    started = place.start("--verbose")
    assert started.stdout is not None
    started.stdout.close()
    assert started.wait(DEADLINE_S) == 0
    assert place.summary()["steps"] == 6


def test_a_searcher_whose_settings_are_wrong_is_not_started_again(place):
    done = place.run(FAKE_SEARCHER="config", FAKE_TRAINER="wait-at-2")
    assert done.returncode == 1
    assert "the engine does not decode this model" in done.stderr
    assert "no searcher is left" in done.stderr
    assert "starting it again" not in done.stdout
    assert place.children() == []


@pytest.mark.parametrize("name", ["buffer", "reward", "redis"])
def test_a_service_that_dies_stops_the_run_at_once(place, name):
    started = place.start(FAKE_TRAINER="wait-at-2")
    wait_for_step_2(place)
    pattern = "redis-server" if name == "redis" else f"tba_{name}"
    (pid,) = [p for p in place.children() if pattern in command_of(p)]
    os.kill(pid, signal.SIGKILL)
    _, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 1
    assert f"error: {name} died (killed by SIGKILL)" in err
    assert "resume with" in err
    assert place.children() == []


def test_ctrl_c_reaches_the_trainer_through_the_supervisor_only_and_can_be_resumed(place):
    started = place.start(FAKE_TRAINER="wait-at-2")
    wait_for_step_2(place)
    # like a terminal: the whole process group of the supervisor
    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 130
    assert err == ""
    assert "resume with: " in out
    assert (place.folder / "checkpoint_on_sigterm").exists()
    assert json.loads((place.folder / "ended.json").read_text())["reason"] == "stopped by Ctrl-C or a signal"
    assert "User requested shutdown" in place.log("redis")
    assert place.children() == []
    assert place.tba(*last_words(out)).returncode == 0


def test_children_die_with_a_supervisor_that_is_killed(place):
    started = place.start(FAKE_TRAINER="wait-at-2")
    wait_for_step_2(place)
    assert len(place.children()) >= 6
    os.kill(started.pid, signal.SIGKILL)
    started.communicate(timeout=DEADLINE_S)
    wait_until("all children gone", lambda: place.children() == [])
    assert place.run("--resume").returncode == 0
    assert place.summary()["num_starts"] == 2


def test_a_supervisor_that_died_before_the_summary_only_writes_it_up_and_that_is_kept_without_redis(place):
    assert place.run().returncode == 0
    (place.folder / "summary.json").unlink()
    trainer_log = place.log("trainer")
    resumed = place.run("--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert place.log("trainer") == trainer_log
    assert place.summary()["steps"] == 6
    (place.folder / "redis" / "fake_buffer.json").unlink()
    refused = place.run("--resume", "--set", "trainer.num_steps=9")
    assert (refused.returncode, "holds nothing of it" in refused.stderr) == (2, True), refused.stderr
    assert place.summary()["steps"] == 6


def test_bad_input_is_one_sentence_before_anything_starts(place, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    lines = [prompt_line(split, split).replace("addition", "nobody") for split in ("train", "heldout")]
    (place.path / "nobody.jsonl").write_text("\n".join(lines))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        away = ("store.url=s3://b/p", 'store.endpoint_url="http://127.0.0.1:9"')
        cases = {
            f"port {port} (buffer.port) is in use by another process": [f"buffer.port={port}"],
            "holds no config.json": ["model.path=nowhere"],
            "unknown key 'trainer.num_step'": ["trainer.num_step=1"],
            "nowhere.jsonl cannot be read": ["data.path=nowhere.jsonl"],
            "127.0.0.1:9": away,
            "trainer.device 'quantum' cannot be used": ["trainer.device=quantum"],
            "searcher.device 'cuda:99' cannot be used": ["searcher.device=cuda:99"],
            "which no reward scores": ["data.path=nobody.jsonl"],
            "no batch could ever be drawn": ["buffer.max_rollouts=3"],
            "correct store.url": ["store.url=file:///proc/x"],
            "Not a directory": ["local.runs_dir=recipe.toml"],
            "store.url 'ftp://x' is not a store": ["store.url=ftp://x"],
        }
        words = {sentence: [word for each in sets for word in ("--set", each)] for sentence, sets in cases.items()}
        for sentence, given in {**words, "there is no run to resume": ["--resume"]}.items():
            refused = place.refused(*given)
            assert sentence in refused.stderr, given
            assert refused.stderr.startswith("error: ")
            assert refused.stderr.count("\n") == 1
            assert not place.folder.exists()
    sets = ("model.policy_temperature=0.7", "searcher.sampling_temperature=1.0", "objective.preset=tb")
    refused = place.refused(*(word for each in (*sets, "data.path=nobody.jsonl") for word in ("--set", each)))
    assert "warning: searcher.sampling_temperature is 1, and model.policy_temperature is 0.7" in refused.stdout
    done = place.run()
    assert done.returncode == 0  # and a failed start leaves nothing in the way
    assert "warning: 1 of 1 held-out prompts have the text of a prompt that is trained on" in done.stdout
    assert "warning: sampling.prompts_per_batch is 16, above the number of prompts to train on (1)" in done.stdout


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "on-the-hub"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 128, **sizes}))
    server = HubServer({"models/org/whole": folder})
    yield server
    server.close()


def hub_environ(place: Workplace, url: str, home: str = "hf") -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_HOME": str(place.path / home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


def test_a_model_of_the_hub_is_fetched_once_and_kept(place, hub):
    commit, environ = commit_of("models/org/whole"), hub_environ(place, hub.url)
    words = ["--set", "model.path=org/whole", "--set", f"model.revision={commit}"]
    done = place.run(*words, **environ)
    assert done.returncode == 0, done.stderr
    assert "fetching model org/whole" in done.stderr + done.stdout
    folder = place.path / "models" / "org" / "whole"
    assert (folder / "model.safetensors").read_text() == "{}"
    assert json.loads((folder / ".tba-prepare").read_text())["commit"] == commit
    assert json.loads((place.folder / "recipe.json").read_text())["model"]["path"] == str(folder)
    num_downloads = len(hub.downloads)
    again = place.run(*words, "--run-name", "again", **hub_environ(place, NOBODY))
    assert again.returncode == 0, again.stderr
    assert len(hub.downloads) == num_downloads


def test_sizing_needs_the_config_of_the_hub_alone(place, hub):
    words = ("sizing", "recipe.toml", "--set", "model.path=org/whole")
    # the stand-in of the trainer traces nothing
    ask = "from tba_cli.artifacts.huggingface import shape_on_hub; print(shape_on_hub('org/whole', None))"
    environ = os.environ | hub_environ(place, hub.url)
    found = subprocess.check_output([sys.executable, "-c", ask], env=environ, encoding="utf-8", timeout=DEADLINE_S)
    assert "num_params=132416" in found
    assert hub.downloads == ["config.json"]
    done = place.tba(*words, **hub_environ(place, NOBODY, home="other"))
    assert (done.returncode, "without a network, fetch it first" in done.stderr) == (2, True), done.stderr


NOT_FETCHED = "model org/{} could not be fetched ({}"
AWAY = "without a network, run it where there is one and copy the folder"


@pytest.mark.parametrize(
    ("words", "is_away", "sentence"),
    [
        (["model.path=org/none"], False, NOT_FETCHED.format("none", "RepositoryNotFoundError")),
        (["model.path=org/whole", 'model.revision="v9"'], False, NOT_FETCHED.format("whole", "RevisionNotFoundError")),
        (["model.path=org/whole"], True, AWAY),
        (['model.revision="v9"'], False, "model.path 'model' is a folder, which has none"),
    ],
)
def test_what_the_hub_has_not_is_said_before_anything_starts(place, hub, words, is_away, sentence):
    environ = hub_environ(place, NOBODY if is_away else hub.url)
    done = place.run(*(word for text in words for word in ("--set", text)), **environ)
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert not (place.path / "models" / "org" / "whole").exists()
    assert not place.folder.exists()
