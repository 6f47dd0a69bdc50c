"""`tba view` and `tba rollouts` of runs that are over, with real Redis and buffer processes over their files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tba.api import AckRequest, BatchRequest, LineageRequest, RunCommand
from tba.clients import BufferClient
from tba.errors import ConfigError, ConflictError
from tba.wire import encode_rollout
from tba_cli.local import ended_run
from tba_cli.main import main
from tba_cli.ports import PortRequest, choose_ports
from tba_cli.run_folder import RunFolder
from tests.support.browser import Watched, until
from tests.support.buffer import SERVICE_PATHS, make_heartbeat, make_prompts, make_rollout, start_stack
from tests.support.waits import DEADLINE_S

REASON = "the trainer died"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The folder of a run whose Redis and buffer were killed while searcher and trainer were alive."""
    place = tmp_path_factory.mktemp("place")
    folder = RunFolder(place / "runs" / "demo")
    folder.redis_path.mkdir(parents=True)
    sections = {
        "sampling": {"min_size_to_sample": 1, "prompts_per_batch": 1, "group_size": 2},
        "store": {"url": f"file://{folder.store_path}"},
    }
    stack = start_stack(place / "stack", redis_folder=folder.redis_path, **sections)
    try:
        client = stack.client
        client.upload_prompts(make_prompts(2))
        lineage = client.new_lineage(LineageRequest(trainer_id="t", parent="0-0"))
        rollouts = [make_rollout(reward=None if i == 0 else float(i), response_text=f"answer {i}") for i in range(5)]
        client.push([encode_rollout(rollout) for rollout in rollouts[:4]])
        wanted = BatchRequest(trainer_id="t", lineage=lineage.lineage, step=1, token=lineage.token, wait_s=0.0)
        batch = client.draw_batch(wanted)
        client.ack(batch.batch_id, AckRequest(lineage=1, step=1, token=lineage.token, policy_ages=[0, 0]))
        client.push([encode_rollout(rollouts[4])])
        for kind in ("trainer", "searcher"):
            client.heartbeat(make_heartbeat(f"{kind}-0", kind, gauges={}))
        # an eviction by age or number, a certificate and tokens of the run must not matter to a view
        document = stack.recipe.model_dump(mode="json")
    finally:
        stack.stop()
    document["auth"]["tokens_file"] = str(place / "gone.json")
    document["buffer"]["host"] = "0.0.0.0"
    folder.write_json(folder.recipe_path, document)
    folder.write_json(folder.ended_path, {"at_s": 1_000_000_000.0, "reason": REASON})
    folder.marker_path.touch()
    return folder


def digests(folder: RunFolder) -> dict[str, tuple[str, int]]:
    """Return path -> (digest, time of change) of every file and folder."""
    return {
        str(path): (hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest(), path.stat().st_mtime_ns)
        for path in [folder.path, *folder.path.rglob("*")]
    }


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of commands, in this process too: copies lie in a folder that the test can look into."""
    (tmp_path / "copies").mkdir()
    more = {"TMPDIR": str(tmp_path / "copies"), "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS))}
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    return {**os.environ, **more}


@contextmanager
def viewing(environ: dict[str, str], *words: str, command: str = "view") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `tba view` and yield it with the address that it prints."""
    program, pipe = [sys.executable, "-m", "tba_cli.main", command, "--no-open", "--json", *words], subprocess.PIPE
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731 a shell starts background commands so
    process = subprocess.Popen(program, env=environ, stdout=pipe, stderr=pipe, text=True, preexec_fn=ignore)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=DEADLINE_S)[1]
        yield process, json.loads(line)["url"]
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=DEADLINE_S)


def get(url: str, path: str, token: str | None, method: str = "GET") -> tuple[int, Any]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    body = None if method == "GET" else b"{}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers, method=method)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_page_of_a_run_that_is_over_is_served_read_only_until_a_signal(ended, environ):
    before = digests(ended)
    (port,) = choose_ports([PortRequest("port", "127.0.0.1", 0)])
    with viewing(environ, str(ended.path), "--port", str(port)) as (process, url):
        base, _, token = url.partition("/#token=")
        assert base == f"http://127.0.0.1:{port}"
        status, page = get(base, "/", None)
        assert (status, b"<html" in page.lower()) == (200, True)
        assert get(base, "/v1/run", None)[0] == 401
        client = BufferClient(base, token=token, retry_s=0)
        info = client.run()
        assert (info.read_only, info.state, info.waits) == (True, "running", [])
        assert (info.note or "").startswith("this run is over since 2001-09-")
        assert (info.note or "").endswith(f": {REASON}")
        assert [item.component_id for item in info.components if item.alive] == ["buffer"]
        assert {item.component_id for item in info.components} == {"buffer", "searcher-0", "trainer-0"}
        stats = client.stats()
        assert (stats.num_rollouts, stats.num_pending) == (5, 1)
        paths = ("curves", "run?summary=true", "prompts", "versions", "ledger", "run/searchers")
        for path in (*paths, "run/changes"):
            assert get(base, f"/v1/{path}", token)[0] == 200, path
        rollout = client.list_rollouts(limit=1).rollouts[0]
        assert client.get_rollout(rollout.rollout_id).prompt_data == {"answer": 0}
        with pytest.raises(ConflictError, match=REASON):
            client.push([encode_rollout(make_rollout())])
        status, problem = get(base, "/v1/run", token, "POST")
        assert (status, REASON in json.loads(problem)["detail"]) == (409, True)
        client.close()
        listening = Path("/proc/net/tcp").read_text().split()
        assert f"00000000:{port:04X}" not in listening, "on loopback alone, whatever the recipe says"
        assert len(list(Path(environ["TMPDIR"]).iterdir())) == 1
        assert not ended.is_in_use
        process.terminate()
        out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out) == (0, ""), err
    assert list(Path(environ["TMPDIR"]).iterdir()) == [], "the copy is deleted"
    assert get_fails(base)
    assert digests(ended) == before


def get_fails(url: str) -> bool:
    try:
        get(url, "/livez", None)
    except OSError:
        return True
    return False


def test_rollouts_of_a_run_that_is_over_are_listed_shown_and_exported(ended, environ, capsys, tmp_path):
    before, run = digests(ended), str(ended.path)
    assert main(["rollouts", "list", run, "--json", "--contains", "ANSWER 3"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rollouts"]
    assert found["reward"] == 3.0
    assert main(["rollouts", "list", run, "--min-reward", "2", "--max-reward", "3", "--order", "best"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[::4]] == ["3,", "2,"]
    assert main(["rollouts", "list", run, "--id", found["rollout_id"]]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["reward"], shown["prompt_data"], shown["sampler_logprobs"][0]) == (3.0, {"answer": 0}, -0.5)

    out = tmp_path / "found.parquet"
    assert main(["rollouts", "export", run, "--out", str(out), "--status", "scored"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote 4 rollouts to {out}, ")
    assert parquet.read_table(out)["response_text"].to_pylist() == [f"answer {i}" for i in range(1, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copies", "found.parquet"]
    assert digests(ended) == before


def test_a_signal_while_the_files_are_copied_leaves_no_copy(ended, environ, capsys, monkeypatch):
    def copy(_: Path, to: Path, **_words: bool) -> None:
        to.mkdir()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("tba_cli.local.ended_run.shutil.copytree", copy)
    assert main(["view", str(ended.path), "--no-open"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    assert list(Path(environ["TMPDIR"]).iterdir()) == []


def test_a_page_that_dies_is_an_error_and_leaves_no_copy(ended: RunFolder, environ: dict[str, str]) -> None:
    with viewing(environ, str(ended.path)) as (process, _):
        copies = environ["TMPDIR"]
        buffers = [
            int(entry.name)
            for entry in Path("/proc").glob("[0-9]*")
            if (words := command_of(entry)) and "tba_buffer" in words and copies in words
        ]
        assert len(buffers) == 1
        os.kill(buffers[0], signal.SIGKILL)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, "buffer died (killed by SIGKILL)" in err) == (1, True), err
    assert list(Path(copies).iterdir()) == []


def command_of(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text()
    except OSError:
        return ""


def test_a_run_that_is_started_while_its_files_are_copied_is_left_alone(ended, tmp_path, monkeypatch):
    folder, num = RunFolder(tmp_path / "demo"), 0
    shutil.copytree(ended.redis_path, folder.redis_path)
    folder.recipe_path.touch()
    folder.marker_path.touch()
    copy, stack = shutil.copytree, ExitStack()

    def copy_while_it_starts(place: Path, to: Path, **_words: bool) -> None:
        nonlocal num
        num += 1
        copy(place, to)
        if num == 1:
            # a resume that has come and gone
            with folder.acquire(resume=True, fresh=False):
                return
        stack.enter_context(folder.acquire(resume=True, fresh=False))
        raise FileNotFoundError("the file that Redis has renamed")

    monkeypatch.setattr(ended_run.shutil, "copytree", copy_while_it_starts)
    with stack:
        for number in range(3):
            with pytest.raises(ConfigError, match="run 'demo' was just started again; repeat this command"):
                ended_run._copy_redis_files(folder, tmp_path / f"copy-{number}")
    assert num == 2, "nothing is copied while it runs"


def steps_of(name: str, rewards: list[float]) -> str:
    records = [{"kind": "start", "step": 0, "at_s": 1000.0, "metrics": {}}]
    records += [
        {"kind": "step", "step": step, "at_s": 1000.0 + 60 * step, "metrics": {"reward_mean": reward}}
        for step, reward in enumerate(rewards, 1)
    ]
    return "".join(json.dumps({"run": name, "lineage": 1, **record}) + "\n" for record in records)


@pytest.fixture
def two_runs(ended: RunFolder, tmp_path: Path) -> Path:
    """A folder with the run that is over, and with another one of which only files are there."""
    place = tmp_path / "runs"
    shutil.copytree(ended.path, place / "demo")
    (place / "demo" / "metrics.jsonl").write_text(steps_of("demo", [0.1, 0.2, 0.3]))
    other = place / "other"
    (other / "logs").mkdir(parents=True)
    document = json.loads(ended.recipe_path.read_bytes())
    document["trainer"]["learning_rate"] = 0.125
    (other / "recipe.json").write_text(json.dumps(document))
    (other / "metrics.jsonl").write_text(steps_of("other", [0.5]))
    (other / "logs" / "trainer.log").write_text("the <b>loss</b> is nan\n")
    (other / ".tba-run").touch()
    return place


def test_runs_are_listed_compared_and_opened_on_one_port(two_runs, environ, browser):
    with viewing(environ, str(two_runs), command="runs") as (process, url):
        base, _, token = url.partition("/#token=")
        for path in (
            "/v1/runs",
            "/v1/runs/demo",
            "/v1/runs/other/logs/trainer",
            "/runs/demo/v1/run",
            "/runs/demo/metrics",
        ):
            assert get(base, path, None)[0] == 401, path
        assert get(base, "/v1/runs/..%2Fdemo", token)[0] == 404
        assert get(base, "/runs/demo", None)[0] == 200, "its slash is added"
        assert len(list(Path(environ["TMPDIR"]).glob("tba-ended-*"))) == 0, "nothing is started for a stranger"
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        watched = Watched(page)
        page.goto(url)
        page.wait_for_selector("main tbody tr")
        chart = page.locator("section", has=page.get_by_role("heading", name="Reward", exact=True)).locator(".plot")
        until(page, "document.querySelector('[aria-labelledby=chart-reward] .plot')?.ariaLabel?.includes('other')")
        said = chart.get_attribute("aria-label") or ""
        assert "demo: 3 values from step 1 to 3" in said
        assert "other: 1 values" in said
        assert page.locator("tr:has-text('trainer.learning_rate') >> text=0.125").count() == 1
        assert page.locator("tr:has-text('objective.preset')").count() == 0, "it is equal"
        page.select_option("#choose-axis", "time")
        until(
            page,
            "document.querySelector('[aria-labelledby=chart-reward] .plot')?.ariaLabel?.includes('from minutes 1')",
        )
        page.select_option("#choose-log", "other/trainer")
        page.wait_for_selector("pre >> text=the <b>loss</b> is nan")
        swatch = page.locator("label:has([id='choose-demo'])").get_attribute("class")
        page.uncheck("[id='choose-other']")
        until(page, "!document.querySelector('[aria-labelledby=chart-reward] .plot').ariaLabel.includes('other')")
        assert page.locator("tr:has-text('objective.preset')").count() == 1, "the whole recipe of one run"
        assert page.locator("pre >> text=loss").count() == 1, "the log that was chosen stays"
        assert page.locator("label:has([id='choose-demo'])").get_attribute("class") == swatch, "its colour stays"
        page.click("main >> text=demo >> nth=0")
        page.wait_for_selector("text=step 1, lineage 1")
        assert token not in page.url
        page.click("nav >> text=Rollouts")
        page.wait_for_selector("text=answer 4")
        page.click("text=All runs")
        page.wait_for_selector("text=All runs >> nth=0")
        page.wait_for_selector("#choose-other")
        assert [error for error in watched.errors if "401" not in error] == []
        assert watched.hosts == {base.split("//")[1]}
        process.terminate()
        out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out) == (0, ""), err
    assert list(Path(environ["TMPDIR"]).iterdir()) == [], "the copies are deleted"


def test_a_run_in_progress_is_asked_at_its_own_buffer(two_runs, environ, serve_buffer):
    served = serve_buffer(tokens={"operator": "operator-secret-1"})
    folder = RunFolder(two_runs / "demo")
    tokens = folder.path / "own.json"
    tokens.write_text(json.dumps({"operator": "operator-secret-1"}))
    folder.write_json(folder.endpoints_path, {"buffer_url": served.url, "tokens_file": str(tokens)})
    with folder.acquire(resume=True, fresh=False), viewing(environ, str(two_runs), command="runs") as (_, url):
        base, _, token = url.partition("/#token=")
        client = BufferClient(f"{base}/runs/demo", token=token, retry_s=0)
        assert (client.run().run, client.run().read_only) == ("test", False)
        client.command("pause", RunCommand(reason="lunch"))
        rows = {row["name"]: row for row in json.loads(get(base, "/v1/runs", token)[1])["runs"]}
        assert (rows["demo"]["state"], rows["demo"]["reason"]) == ("waiting", "The run is paused (lunch).")
        client.upload_prompts([make_prompts(1)[0].model_copy(update={"prompt_id": "a/b?c"})])
        assert get(base, "/runs/demo/v1/prompts/a%2Fb%3Fc", token)[0] == 200
        client.close()
    assert served.client(token="operator-secret-1").run().state == "paused"
