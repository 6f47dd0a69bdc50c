"""`tba.run` and `tba.Run` with real services: a task, scorer and objective of a script; interrupt; live; over."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

import tba
from tba.api import LedgerEntry, RunCommand
from tba.errors import ChildError, ConfigError, ConflictError
from tba_cli.reports.ledger import ledger_lines
from tba_cli.run_folder import RunFolder
from tba_cli.scripting import Run
from tests.support.buffer import SERVICE_PATHS
from tests.support.e2e import ENDLESS, tiny_sections
from tests.support.tiny_reward_models import save_chat_model
from tests.support.waits import DEADLINE_S, until

NUM_STEPS, BATCH_ROLLOUTS = 20, 16
NOTEBOOK = SERVICE_PATHS[0] / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def prompts() -> list[dict[str, Any]]:
    return [
        {
            "prompt_id": f"sum-{n}",
            "task": "sums",
            "text": f"{n}+{n}=",
            "data": {"number": 2 * n},
            "split": "heldout" if n % 4 == 0 else "train",
        }
        for n in range(20, 60)
    ]


def own_scorer() -> Callable[..., list[float]]:
    def by_length(prompts, completions, number, **columns):
        import math

        return [math.tanh(len(text)) + each / 1000 for text, each in zip(completions, number, strict=True)]

    return by_length


def own_objective() -> Callable[..., Any]:
    def plain_gradient(sequences, tokens, settings, beta):
        from tba_trainer.objectives.advantages import group_mean

        advantage = sequences.reward - group_mean(sequences.reward, sequences.group)
        return -advantage[tokens.row] * tokens.logprobs

    return plain_gradient


@pytest.fixture(scope="module")
def finished(place: Path, model: Path) -> Iterator[Run]:
    async def in_a_notebook() -> Run:
        # a kernel has a running event loop
        return tba.run(
            tiny_sections(model),
            # a sum of one score has no parts
            rewards=[own_scorer(), {"kind": "format", "pattern": "[0-9]", "weight": 0.0}],
            objective=own_objective(),
            prompts=prompts(),
            name="finished",
            progress=False,
        )

    with asyncio.run(in_a_notebook()) as run:
        yield run


def test_a_run_is_made_with_what_the_script_has(finished: Run, place: Path):
    assert (finished.path, finished.is_over) == (place / "runs" / "finished", True)
    info = finished.info
    assert (info.run, info.state, info.step, info.read_only) == ("finished", "done", NUM_STEPS, True)
    assert "is done" in finished.summary().doing
    scorer, numbers = own_scorer(), {row["prompt_id"]: row["data"]["number"] for row in prompts()}
    rollouts = list(finished.rollouts(status="scored"))
    assert finished.client.stats().rollouts_generated == len(rollouts) >= NUM_STEPS * BATCH_ROLLOUTS
    for rollout in rollouts:
        assert rollout.reward == pytest.approx(scorer([], [rollout.response_text], [numbers[rollout.prompt_id]])[0])
        assert [part.name for part in rollout.reward_parts or []] == ["by_length", "format"]
    # an objective of one's own has no advantages that the trainer knows of
    assert "advantage_abs_mean" not in finished.metrics()


def test_model_rows_and_a_function_are_enough(place: Path):
    def shorter(completions: list[list[dict[str, str]]], most: list[int], **columns: Any) -> list[float]:
        return [1 - len(turns[0]["content"]) / each for turns, each in zip(completions, most, strict=True)]

    rows = [{"prompt": [{"role": "user", "content": f"Say {n}"}], "most": 99} for n in range(20)]
    model = str(save_chat_model(place / "chat"))
    # the numbers are for real models
    sets = ["searcher.max_response_tokens=8", "trainer.micro_batch_tokens=512", "eval.every_steps=2"]
    with tba.run(model=model, prompts=rows, rewards=[shorter], steps=2, lora=False, sets=sets, progress=False) as run:
        assert (run.path, run.info.state, run.info.step) == (place / "runs" / "chat", "done", 2)
        assert len(run.metrics()["reward_mean"]) == 2
        rollout = next(run.rollouts(status="scored"))
        assert rollout.reward == pytest.approx(1 - len(rollout.response_text) / 99)


def test_an_ended_run_becomes_tables(finished: Run, tmp_path: Path):
    metrics = finished.metrics()
    assert list(metrics)[:2] == ["step", "at_s"]
    assert metrics["step"] == list(range(1, NUM_STEPS + 1))
    assert metrics["at_s"] == sorted(metrics["at_s"])
    assert {len(column) for column in metrics.values()} == {NUM_STEPS}
    ledger = [line for line in ledger_lines(finished.client) if isinstance(line, LedgerEntry)]
    assert metrics["reward_mean"] == pytest.approx([line.metrics["reward_mean"] for line in ledger])

    finished.client.export_rollouts(tmp_path / "good.parquet", min_reward=1.0)
    rollouts = pandas.read_parquet(tmp_path / "good.parquet")
    assert rollouts["rollout_id"].tolist() == [item.rollout_id for item in finished.rollouts(min_reward=1.0)]
    assert min(rollouts["reward"].tolist()) >= 1.0
    best = next(finished.rollouts(order="best"))
    assert best.reward == max(item.reward or 0.0 for item in finished.rollouts(status="scored"))
    assert {item.version for item in finished.info.evals} == {"0-0", f"1-{NUM_STEPS}"}


def test_one_view_serves_all_calls_and_ends(finished: Run):
    url = finished.client.base_url
    assert finished.client.stats().num_rollouts > 0
    assert (finished.client.base_url, finished.view().partition("#")[0]) == (url, f"{url}/")
    with pytest.raises(ConflictError, match="read-only"):
        finished.client.command("pause", RunCommand())
    views = processes_of(url)
    assert views
    finished.close()
    until("the end of the view", lambda: not processes_of(url))
    assert finished.info.step == NUM_STEPS, "it is opened again where it is needed"


def processes_of(url: str) -> list[int]:
    port = url.rpartition(":")[2]
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
            if "tba_buffer" in words and f":{port}" in Path(words[words.index("--config") + 1]).read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.nightly
def test_an_interrupt_stops_it_and_the_same_call_resumes_it(place: Path, model: Path, capfd):
    given: dict[str, Any] = {"rewards": [own_scorer()], "prompts": prompts(), "name": "stopped"}
    recipe = tiny_sections(model, trainer={"num_steps": ENDLESS}, searcher={"num_searchers": 1})
    failures: list[BaseException] = []

    def use_and_interrupt() -> None:
        try:
            use_live(place)
        except BaseException as error:
            failures.append(error)
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=use_and_interrupt)
    user.start()

    async def in_a_loop() -> Run:
        # `asyncio.run` has a handler for SIGINT that a blocking call does not notice
        return tba.run(recipe, **given)

    run = asyncio.run(in_a_loop())
    user.join()
    assert failures == []
    shown = capfd.readouterr()
    assert f"/{ENDLESS}" in shown.out
    assert "tba_cli.main" not in shown.out, "a command that would lack the functions is not recommended"
    assert "the same tba.run(...) with resume=True continues it" in shown.out
    with run:
        assert run.is_over
        step = run.info.step
        with pytest.raises(ConfigError, match="--resume"):
            tba.run(recipe, **given)
        again = tba.run(recipe, **given, resume=True, sets=[f"trainer.num_steps={step + 5}"], progress=False)
        assert capfd.readouterr() == ("", "")
        # the view of the first start is of no use any more
        assert (run.info.step, run.info.lineage) == (step + 5, 2)
        assert run.metrics()["step"] == list(range(1, step + 6))
        again.close()


def use_live(place: Path) -> None:
    folder = place / "runs" / "stopped"
    until("the run", lambda: (folder / "endpoints.json").exists())
    with tba.Run(folder) as live:
        until("steps", lambda: live.info.step >= 3)
        assert not live.is_over
        assert next(live.rollouts(order="newest"))
        assert live.metrics()["step"][:3] == [1, 2, 3]
        assert live.client.command("pause", RunCommand(reason="look")).state == "paused"
        assert live.client.command("resume", RunCommand()).state == "running"
        token = live.view().partition("#token=")[2]
        with tba.Run(url=live.client.base_url, token=token) as elsewhere:
            assert elsewhere.info.run == "stopped"
            assert elsewhere.path is None
            assert not elsewhere.is_over


def test_what_cannot_run_is_a_sentence_and_a_failure_is_an_error(model: Path, place: Path):
    with pytest.raises(ConfigError, match="which no reward scores"):
        tba.run(tiny_sections(model), prompts=prompts(), name="wrong", progress=False)
    assert not (place / "runs" / "wrong").exists()

    def broken(sequences, tokens, settings, beta):
        raise RuntimeError("this objective is broken")

    with pytest.raises(ChildError, match=r"(?s)this objective is broken.*trainer died.*tba.run.* with resume=True"):
        tba.run(tiny_sections(model), objective=broken, name="broken", progress=False)
    with tba.Run("broken") as run:
        assert run.info.step == 0


SCRIPT = """
import json, tba

print("the script begins", flush=True)


def always(prompts, completions, **columns):
    return [1.0 for _ in completions]


tba.run(json.load(open("recipe.json")), rewards=[always], prompts=json.load(open("prompts.json")), name="script")
"""


@pytest.mark.nightly
def test_a_script_without_a_guard_runs_once_and_its_run_ends_when_it_is_killed(place: Path, model: Path):
    (place / "script.py").write_text(SCRIPT)
    (place / "recipe.json").write_text(json.dumps(tiny_sections(model, trainer={"num_steps": ENDLESS})))
    (place / "prompts.json").write_text(json.dumps(prompts()))
    folder = place / "runs" / "script"
    with (place / "script.out").open("w") as out:
        script = subprocess.Popen([sys.executable, "script.py"], stdout=out, stderr=out)
    try:
        until("the run", lambda: (folder / "endpoints.json").exists() or script.poll() is not None)
        with tba.Run(folder) as live:
            until("a step", lambda: live.info.step >= 1)
            assert {rollout.reward for rollout in itertools.islice(live.rollouts(status="scored"), 20)} == {1.0}
    finally:
        script.kill()
        script.wait()
    until("the end of the run", lambda: not RunFolder(folder).is_in_use)
    assert (place / "script.out").read_text().count("the script begins") == 1


@pytest.mark.nightly
def test_the_notebook_runs_from_top_to_bottom(model: Path, tmp_path: Path):
    # without this, most of its time would go into the starting model
    shutil.copytree(model, tmp_path / "models" / "quickstart-0")
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.notebook", str(NOTEBOOK)],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The run is done" in done.stdout
    assert "1-60 done mean reward on held-out prompts" in done.stdout
    print(f"the notebook took {time.monotonic() - began_s:.0f} s")


def test_the_notebook_is_kept_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
