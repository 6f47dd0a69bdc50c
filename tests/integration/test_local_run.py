"""`tba run` with a real Redis and stand-ins for the services (local_fakes/): order, endings, cleanliness.

Every test starts the real command line in a process of its own, as a person would.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_workplace import DEADLINE_S, RECIPE, Workplace, wait_until


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
    done = place.run("--verbose", "--set", "searcher.torch_num_threads=3", *words)
    assert done.returncode == 0, done.stderr
    return place, done


def command_of(pid: int) -> str:
    """The command line of a process; of one that has ended, nothing."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def wait_for_step_2(place: Workplace) -> None:
    """A trainer that waits at step 2 has done it, and every child is up."""
    path = place.folder / "logs" / "trainer.log"
    wait_until("step 2", lambda: path.exists() and "step 2" in path.read_text())
    wait_until("both searchers", lambda: all("nice" in place.log(f"searcher-{i}") for i in range(2)))


def test_a_run_goes_from_recipe_to_report_and_leaves_no_process(finished):
    place, done = finished
    assert done.stderr == ""
    assert "pass@1 sampled: 0.250 -> 0.500 on 8 held-out prompts" in done.stdout
    assert f"summary: {place.folder}/summary.json" in done.stdout
    assert place.summary()["steps"] == 6
    assert place.summary()["first_step_s"] > 0
    assert json.loads((place.folder / "model" / "config.json").read_text()) == {"exported": True}
    assert (place.folder / "report.html").exists()
    assert not (place.folder / "endpoints.json").exists()
    assert place.children() == []
    config = json.loads((place.folder / "config.json").read_text())
    assert config["buffer"]["port"] > 0
    assert config["store"]["url"] == f"file://{place.folder}/store"


def test_children_get_their_priority_threads_and_no_stdin(finished):
    place, done = finished
    line = "searcher-1 nice 5 threads 3 stdin ''"
    assert place.log("searcher-1").startswith(line)
    assert f"searcher-1  | {line}" in done.stdout


def test_redis_ran_with_an_append_only_file_in_the_run_folder(finished):
    place, _ = finished
    assert list((place.folder / "redis").rglob("*appendonly*"))
    assert "Redis is now ready to exit, bye bye" in place.log("redis")


def test_a_warm_start_makes_the_model_and_its_time_is_reported_apart(finished):
    place, _ = finished
    assert (place.path / "made" / "config.json").exists()
    assert place.summary()["warm_start_s"] > 0


def test_a_finished_run_is_neither_overwritten_nor_resumed(finished):
    place, _ = finished
    again = place.run()
    assert again.returncode == 2
    assert "--fresh" in again.stderr
    assert "exists already" in again.stderr
    resumed = place.run("--resume")
    assert resumed.returncode == 0
    assert "nothing to resume" in resumed.stdout
    assert "pass@1 sampled: 0.250 -> 0.500" in resumed.stdout


def test_fresh_begins_again_and_quiet_prints_the_result_only(place):
    assert place.run(FAKE_TRAINER="die-at-2").returncode == 1
    done = place.run("--fresh", "--quiet", "--seed", "3")
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
    assert "resume with: tba run recipe.toml --resume" in died.stderr
    assert "trainer | about to die" in died.stdout
    assert place.children() == []
    resumed = place.run("--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert place.summary()["steps"] == 6
    assert place.summary()["lineages"] == 2
    assert place.summary()["num_starts"] == 2
    assert place.summary()["ledger_violations"] == []


def test_resume_keeps_the_recipe_of_the_start_except_what_is_set(place):
    assert place.run("--seed", "5", FAKE_TRAINER="die-at-2").returncode == 1
    (place.path / "recipe.toml").write_text(RECIPE.replace("num_steps = 6", "num_steps = 99"))
    wrong_seed = place.run("--resume", "--seed", "6")
    assert wrong_seed.returncode == 2
    assert "began with seed 5, not 6; leave out --seed" in wrong_seed.stderr
    set_seed = place.run("--resume", "--set", "run.seed=6")
    assert set_seed.returncode == 2
    assert "began with seed 5, not 6; leave out --set run.seed" in set_seed.stderr
    assert place.run("--resume", "--set", "trainer.num_steps=8").returncode == 0
    assert place.summary()["steps"] == 8
    assert place.summary()["seed"] == 5


def test_nothing_of_an_older_run_is_deleted_when_the_new_one_cannot_start(place):
    assert place.run().returncode == 0
    (place.path / "tokens.json").write_text(json.dumps({"operator": "o" * 16, "trainer": "t" * 16}))
    for name, sentence in {
        "nowhere.json": "nowhere.json cannot be read",
        "tokens.json": "no token for the role 'searcher'",
    }.items():
        refused = place.run("--fresh", "--set", f"auth.tokens_file={name}")
        assert refused.returncode == 2
        assert sentence in refused.stderr
        assert place.summary()["steps"] == 6


def test_a_child_that_dies_without_a_word_has_no_lines_above(place):
    died = place.run("--set", "local.redis_server=/bin/false")
    assert died.returncode == 1
    assert f"redis died (exit code 1) and wrote nothing to {place.folder}/logs/redis.log" in died.stderr


def test_a_child_that_explains_its_end_is_quoted(place):
    done = place.run(FAKE_TRAINER="error")
    assert done.returncode == 1
    assert done.stderr.startswith("error: trainer ended (exit code 2): the learning rate is silly [")


def test_a_run_that_failed_can_be_resumed(place):
    failed = place.run(FAKE_TRAINER="fail")
    assert failed.returncode == 1
    assert "the loss is not finite" in failed.stderr
    assert failed.stderr.count("\n") == 1
    resumed = place.run("--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert place.summary()["steps"] == 6


def test_a_run_outlives_the_reader_of_its_output(place):
    started = place.start("--verbose")
    assert started.stdout is not None
    started.stdout.close()
    assert started.wait(DEADLINE_S) == 0
    assert place.summary()["steps"] == 6


def test_a_searcher_that_keeps_dying_is_restarted_and_then_left_out(place):
    words = ("--set", "local.max_searcher_restarts=1")
    started = place.start(*words, FAKE_SEARCHER="die", FAKE_TRAINER="wait-for-go")
    path = place.folder / "logs" / "searcher-0.log"
    wait_until("its second death", lambda: path.exists() and path.read_text().count("nice") == 2)
    wait_until("it is gone", lambda: len([p for p in place.children() if "tba_searcher" in command_of(p)]) == 1)
    (place.folder / "go").touch()
    out, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 0, err
    assert "searcher-0 died (exit code 7)" in out
    assert "starting it again (1 of 1 restarts)" in out
    assert "the run goes on with 1" in out
    assert place.log("searcher-0").count("nice") == 2


def test_a_run_without_any_searcher_left_fails(place):
    done = place.run("--set", "local.max_searcher_restarts=0", FAKE_SEARCHER="all-die", FAKE_TRAINER="wait-at-2")
    assert done.returncode == 1
    assert "no searcher is left" in done.stderr
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_reaches_the_trainer_through_the_supervisor_only_and_can_be_resumed(place, number):
    started = place.start(FAKE_TRAINER="wait-at-2")
    wait_for_step_2(place)
    # like a terminal: the whole process group of the supervisor
    os.killpg(started.pid, number)
    out, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 130
    assert err == ""
    assert "resume with: tba run recipe.toml --resume" in out
    assert (place.folder / "checkpoint_on_sigterm").exists()
    assert "User requested shutdown" in place.log("redis")
    assert place.children() == []
    assert place.run("--resume").returncode == 0


def test_children_die_with_a_supervisor_that_is_killed(place):
    started = place.start(FAKE_TRAINER="wait-at-2")
    wait_for_step_2(place)
    assert len(place.children()) >= 6
    os.kill(started.pid, signal.SIGKILL)
    started.communicate(timeout=DEADLINE_S)
    wait_until("all children gone", lambda: place.children() == [])
    assert place.run("--resume").returncode == 0
    assert place.summary()["num_starts"] == 2


def test_two_supervisors_cannot_share_a_run_folder(place):
    started = place.start(FAKE_TRAINER="wait-at-2")
    wait_for_step_2(place)
    for flag in ("--resume", "--fresh"):
        second = place.run(flag)
        assert second.returncode == 2
        assert f"in use by another `tba run` (process {started.pid})" in second.stderr
    started.terminate()
    started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 130


def test_a_supervisor_that_died_before_the_summary_only_writes_it_up(place):
    assert place.run().returncode == 0
    (place.folder / "summary.json").unlink()
    trainer_log = place.log("trainer")
    resumed = place.run("--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert place.log("trainer") == trainer_log
    assert place.summary()["steps"] == 6


def test_commands_find_the_running_run(place):
    started = place.start(FAKE_TRAINER="wait-at-2")
    wait_for_step_2(place)
    status = place.tba("status")
    assert status.returncode == 0, status.stderr
    assert status.stdout.startswith("run 'demo': running, step 2, lineage 1")
    assert json.loads(place.tba("status", "demo", "--json").stdout)["run"]["step"] == 2
    assert "paused (lunch)" in place.tba("pause", "--reason", "lunch").stdout
    assert "running" in place.tba("resume", "--run-dir", str(place.folder)).stdout
    check = place.tba("ledger", "check")
    assert check.returncode == 0
    assert "every step of the living lineage exactly once (2 steps, 2 batches, 0 of them abandoned" in check.stdout
    upload = place.tba("prompts", "upload", "prompts.jsonl")
    assert upload.stdout.startswith("0 new and 2 known prompts")
    assert "stopping" in place.tba("stop").stdout
    started.terminate()
    started.communicate(timeout=DEADLINE_S)
    gone = place.tba("status")
    assert gone.returncode == 2
    assert gone.stderr.startswith("error: no run is going under runs/")


def test_bad_input_is_one_sentence_before_anything_starts(place):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        cases = {
            f"port {port} (buffer.port) is in use by process {os.getpid()}": ["--set", f"buffer.port={port}"],
            "holds no config.json": ["--set", "model.path=nowhere"],
            "local.redis_server is '/nowhere'": ["--set", "local.redis_server=/nowhere"],
            "unknown key 'trainer.num_step'": ["--set", "trainer.num_step=1"],
            "prompt file": ["--set", "data.path=nowhere.jsonl"],
            "127.0.0.1:9": [
                "--set",
                "store.url=s3://b/p",
                "--set",
                'store.endpoint_url="http://127.0.0.1:9"',
                "--set",
                "store.timeout_s=2",
            ],
            "there is no run to resume": ["--resume"],
        }
        for sentence, words in cases.items():
            done = place.run(*words, AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y")
            assert done.returncode == 2, (words, done.stderr)
            assert sentence in done.stderr, (words, done.stderr)
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1
            assert not (place.folder / "logs").exists()
    assert place.run().returncode == 0  # and a failed start leaves nothing in the way
