"""`tba run` and the commands with the real buffer and reward services; only trainer and searchers are stand-ins."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import AuthenticationError, Redis
from tba_buffer.storage.keys import Keys

from tba.clients import BufferClient, RewardClient
from tba.errors import UnauthorizedError
from tba.tokens import client_token, operator_token
from tba.wire import encode_rollout
from tba_cli.main import main
from tba_cli.ports import PortRequest, choose_ports
from tests.support.local_workplace import DEADLINE_S, FAKES, ROOT, Workplace, wait_until
from tests.support.secrets_seen import SEEN, tokens_seen
from tests.support.trainer_values import make_rollout


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """Its buffer and reward services are real, its trainer and searchers are stand-ins."""
    services, links = ROOT / "services", tmp_path / "packages"
    links.mkdir()
    for source in (services / "buffer" / "tba_buffer", services / "reward" / "tba_reward"):
        (links / source.name).symlink_to(source)
    for name in ("tba_trainer.py", "tba_searcher.py"):
        (links / name).symlink_to(FAKES / name)
    place = Workplace(tmp_path)
    place.environ["PYTHONPATH"] = f"{links}:{ROOT}"
    yield place
    place.close()


def test_no_other_user_of_the_machine_gets_into_a_run(place: Workplace, tmp_path: Path) -> None:
    """They can connect to every port on loopback and read every command line."""
    (tmp_path / "runs" / "demo").mkdir(parents=True)  # made by another user, open to all
    started = place.start("--set", "trainer.export=false", FAKE_TRAINER="no-steps")
    path = place.folder / "endpoints.json"
    wait_until("the run is going", lambda: path.exists() and "lineage 1" in place.tba("status").stdout)
    endpoints = json.loads(path.read_text())
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
    secrets = [file for file in (place.folder / "secrets").rglob("*") if file.is_file()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}
    buffer, reward = BufferClient(endpoints["buffer_url"], retry_s=0), RewardClient(endpoints["reward_url"], retry_s=0)
    for look in (buffer.run, reward.rewards):
        with pytest.raises(UnauthorizedError):
            look()
    with Redis.from_url(endpoints["redis_url"]) as stranger:
        for attack in (lambda: stranger.config_set("dir", str(tmp_path)), stranger.ping, stranger.dbsize):
            with pytest.raises(AuthenticationError):
                attack()
    # each child has the file of its role, and none has a token or a password where all can read it
    texts = [word for file in secrets for word in re.findall(r"[0-9a-f]{48,}", file.read_text())]
    files = {}
    for pid in place.children():
        words = Path(f"/proc/{pid}/cmdline").read_text()
        environ = Path(f"/proc/{pid}/environ").read_text()
        assert not any(text in words + environ for text in texts)
        if kind := re.search(r"\0-m\0tba_(buffer|reward|searcher|trainer)\0", words):
            files.setdefault(kind[1], set()).update(re.findall(r"TBA_AUTH__TOKENS_FILE=([^\0]*)", environ))
    tokens = place.folder / "secrets" / "tokens"
    kinds = ("buffer", "reward", "searcher", "trainer")
    assert files == {kind: {str(tokens / f"{kind}.json")} for kind in kinds}
    sees = {kind: tokens_seen([tokens / f"{kind}.json"]) for kind in kinds}
    assert sees == {kind: (SEEN[kind].sends, SEEN[kind].checks) for kind in kinds}
    first = (tokens / "all.json").read_text()
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=DEADLINE_S)
    again = place.start("--resume", "--set", "trainer.export=false", FAKE_TRAINER="no-steps")
    wait_until("it is going again", lambda: path.exists() and "lineage 2" in place.tba("status").stdout)
    assert (tokens / "all.json").read_text() != first, "tokens are new at every start"
    assert place.tba("stop").returncode == 0
    out, err = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, out + err


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def listens(listener: socket.socket, port: int) -> bool:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:  # the connections of those that ended are not all closed yet
        return False
    listener.listen()
    return True


def push_rollouts(place: Workplace) -> None:
    endpoints = json.loads((place.folder / "endpoints.json").read_text())
    client = BufferClient(endpoints["buffer_url"], token=client_token(endpoints["tokens_file"], "searcher"))
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(rng, prompt_id="a", reward=reward) for reward in (0.0, 1.0, 0.5)]
    outcomes = client.push([encode_rollout(rollout) for rollout in rollouts]).outcomes
    assert [item.outcome for item in outcomes] == ["new"] * 3
    client.close()


def test_a_start_over_a_loss_says_at_once_how_to_accept_it(place: Workplace) -> None:
    """An earlier buffer recorded a loss of Redis, and the run was killed before the loss was accepted."""
    words = ("--set", "trainer.export=false")
    started = place.start(*words, FAKE_TRAINER="no-steps")
    wait_until("the run is going", lambda: "lineage 1" in place.tba("status").stdout)
    url = json.loads((place.folder / "endpoints.json").read_text())["redis_url"]
    password = (place.folder / "secrets" / "redis_password").read_text().strip()
    with Redis.from_url(url, password=password) as redis:
        redis.hset(Keys("demo").run, "changes_missing", 5)
    started.kill()
    started.communicate(timeout=DEADLINE_S)
    wait_until("no child is left", lambda: place.children() == [])
    (place.folder / "endpoints.json").unlink()  # as after a run that was stopped

    over = place.tba("status")
    assert over.returncode == 0, over.stderr
    assert "Redis has lost data of this run: 5 acknowledged changes" in over.stdout

    resumed = place.start("--resume", "--set", "local.start_timeout_s=120", FAKE_TRAINER="no-steps")
    assert resumed.stdout is not None
    line = next(line for line in resumed.stdout if line.startswith("to continue without what is lost"))
    command = line.partition(" in another terminal: ")[2]
    where: dict[str, Any] = {"cwd": place.path, "env": place.environ}
    accepted = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=DEADLINE_S, **where)
    assert accepted.returncode == 0, accepted.stderr
    assert accepted.stdout.startswith("accepted: Redis has lost data")
    wait_until("the run continues", lambda: "lineage 2" in place.tba("status").stdout)
    assert place.tba("stop").returncode == 0
    out, err = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, out + err


def test_a_run_that_is_over_is_read_from_its_files_and_can_continue_and_be_steered(place, tmp_path, capsys, request):
    (port,) = choose_ports([PortRequest("buffer.port", "127.0.0.1", 0)])
    words = ("--set", "trainer.export=false", "--set", f"buffer.port={port}")
    started = place.start(*words, FAKE_TRAINER="no-steps")
    another = socket.socket()
    request.addfinalizer(another.close)
    going = "run 'demo': running, step 0, lineage "
    wait_until("its lineage", lambda: place.tba("status").stdout.startswith(f"{going}1"))
    push_rollouts(place)
    live = place.tba("rollouts", "list", "--order", "best", "--limit", "2").stdout
    assert "reward 1, version 0-0, age 0 steps" in live
    assert "prompt a: '1+1='" in live
    assert "there are more: " in live
    endpoints = json.loads((place.folder / "endpoints.json").read_text())
    page = f"{endpoints['buffer_url']}/#token={operator_token(endpoints['tokens_file'])}"
    viewed = place.tba("view", "demo", "--no-open", "--json")
    assert json.loads(viewed.stdout) == {"url": page}, "it returns at once"
    started.kill()
    started.communicate(timeout=DEADLINE_S)
    wait_until("no child is left", lambda: place.children() == [])
    before = contents(place.folder)
    wait_until("another run has the port", lambda: listens(another, port))

    status = place.tba("status")
    assert status.returncode == 0, status.stderr
    first, second, third, *others = status.stdout.splitlines()
    why = "killed, or the machine went down"
    assert first.startswith("run 'demo' is over since 2")
    assert why in first
    assert second == "  resume with: tba run runs/demo/recipe.json --resume"
    assert third.startswith("  its last state: run 'demo': ")
    assert any("3 stored" in line for line in others)
    assert not any("SILENT" in line or "waits for" in line for line in others)
    with contextlib.chdir(tmp_path):
        assert main(["status", "demo", "--json"]) == 0
        assert why in json.loads(capsys.readouterr().out)["ended"]["reason"]
        assert main(["status", "--follow"]) == 0
        assert capsys.readouterr().out == status.stdout
    check = place.tba("ledger", "check")
    assert (check.returncode, "exactly once (0 steps" in check.stdout) == (0, True), check.stderr
    again = place.tba("rollouts", "list", "--order", "best", "--limit", "2")
    assert again.stdout == live, again.stderr
    assert contents(place.folder) == before
    assert place.children() == []
    another.close()

    resumed = place.start("--resume", FAKE_TRAINER="no-steps")
    wait_until("the next lineage", lambda: place.tba("status").stdout.startswith(f"{going}2"))
    assert place.tba("rollouts", "list", "--order", "best", "--limit", "2").stdout == live
    status = json.loads(place.tba("status", "--json").stdout)
    assert (status["stats"]["num_prompts_train"], status["stats"]["num_prompts_heldout"]) == (1, 1)
    assert "paused (lunch)" in place.tba("pause", "--reason", "lunch").stdout
    assert place.tba("resume").stdout.startswith("run 'demo': running")
    assert "0 new and 2 known prompts" in place.tba("prompts", "upload", "prompts.jsonl").stdout
    assert place.tba("ledger", "check").returncode == 0
    assert place.tba("stop", "--reason", "enough").returncode == 0
    out, err = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, err
    assert "pass@1 sampled: unknown -> unknown" in out
    assert (place.summary()["steps"], place.summary()["final_accuracy"]) == (0, None)
    assert place.children() == []
    over = place.tba("status").stdout.splitlines()
    assert over[0].endswith(": it is done")
    assert over[1].startswith("  its last state: run 'demo': done")
