"""A model process that hangs, dies, forks, cannot load: every item gets a score or a reason.

One process is started for all tests and loses its life several times; after each test it works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file
from tba_reward.model_server.client import ModelPool, ModelProcess
from tba_reward.scorer import Failure, Item
from tba_reward.scorers import Tools, reward_model

from tba.config.reward import RewardModelSpec
from tests.support.tiny_reward_models import save_reward_model, save_victim

CODE = """
import os, signal, time
from transformers import GPTNeoXConfig, GPTNeoXForSequenceClassification


class PoisonedConfig(GPTNeoXConfig):
    pass


class Poisoned(GPTNeoXForSequenceClassification):
    config_class = PoisonedConfig

    def forward(self, input_ids, **others):
        texts = ["".join(map(chr, row)) for row in input_ids.tolist()]
        def rows(letter):
            return [chr(LETTERS[letter]) * 3 in text for text in texts]
        def found(letter):
            return any(rows(letter))
        if found("H"):
            if os.fork() == 0:
                time.sleep(600)
            time.sleep(600)
        if found("D"):
            if os.fork() == 0:  # out of the process group, with its pipes
                os.setsid()
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSEGV)
        if found("M"):
            raise MemoryError("no memory for this")
        output = super().forward(input_ids, **others)
        output.logits[rows("N")] = float("nan")
        return output
"""
HANG, DIE, MEMORY, NAN = "HHH", "DDD", "MMM", "NNN"


def save_poisoned_model(folder: Path) -> Path:
    save_reward_model(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    letters = {letter: tokenizer["model"]["vocab"][letter] for letter in "HDMN"}
    (folder / "poisoned.py").write_text(f"LETTERS = {letters}\n{CODE}")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "poisoned.PoisonedConfig",
        "AutoModelForSequenceClassification": "poisoned.Poisoned",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


pytestmark = pytest.mark.asyncio(loop_scope="module")

GOOD = ["a", "bb", "ccc", "dddd"]


def spec_of(folder: Path, **settings) -> RewardModelSpec:
    settings = {"num_threads": 1, "timeout_s": 250.0, "batch_wait_s": 0.05, **settings}
    return RewardModelSpec(kind="reward_model", model=str(folder), **settings)


def build(folder: Path, **settings):
    tools = Tools(pool=None, models=ModelPool())  # type: ignore[arg-type]  # no workers are needed
    return reward_model.build(spec_of(folder, **settings), tools)


@pytest.fixture(scope="module")
async def poisoned(tmp_path_factory):
    root = tmp_path_factory.mktemp("poisoned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(root / "modules"))
        patch.setattr(RewardModelSpec, "batch_timeout_s", 6.0)
        # the code that this trusts is written by save_poisoned_model itself
        scorer = build(save_poisoned_model(root / "model"), trust_remote_code=True)
        await scorer.start()
        assert scorer.health() == "ok"
        yield scorer
        await scorer.close()


async def score(scorer, *texts):
    return await scorer.score([Item(prompt="", response=text) for text in texts])


async def test_one_item_that_raises_fails_alone_in_its_batch(poisoned):
    pid = poisoned._process.pid
    first, memory, nan, last = await score(poisoned, "a", MEMORY, NAN, "a")
    assert isinstance(first, float)
    assert first == pytest.approx(last, abs=1e-5)
    assert memory == Failure("out_of_memory", "MemoryError: no memory for this")
    assert nan == Failure("not_finite", "the model's output is nan")
    assert poisoned._process.pid == pid


async def test_what_kills_or_hangs_the_process_fails_alone_and_the_others_are_scored(poisoned):
    """Three processes: all items in one batch, then the two that kill it, each alone. Their children are killed, too.

    A child that left the process group before that holds the pipes open, and no code waits for it.
    """
    wanted = await score(poisoned, *GOOD)
    process = psutil.Process(poisoned._process.pid)
    scoring = asyncio.create_task(score(poisoned, HANG, *GOOD, DIE))
    forked = set()
    while not scoring.done():
        if poisoned._process.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                pid = poisoned._process.pid
                forked.update(p for p in psutil.Process(pid).children(recursive=True) if os.getpgid(p.pid) == pid)
        await asyncio.sleep(0.01)
    hung, *values, died = scoring.result()
    assert values == pytest.approx(wanted, abs=1e-5)
    assert (died.reason, hung.reason) == ("crashed", "timeout")
    assert "SIGSEGV" in died.detail
    assert "longer than 6.0 s" in hung.detail
    assert not process.is_running()
    assert forked
    await until(lambda: not any(map(is_alive, forked)))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_cancelled_items_are_given_up_and_their_place_is_free(poisoned):
    scoring = asyncio.create_task(score(poisoned, *["x" * 100] * 200))
    await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert not poisoned._process._pending
    assert all(isinstance(value, float) for value in await score(poisoned, *GOOD))


async def test_an_item_past_its_deadline_is_a_timeout(poisoned):
    score_one = poisoned._process.score
    late = Failure("timeout", "the model process did not answer within 0.0 s")
    assert await score_one("", "a", timeout_s=0.0) == late
    assert isinstance(await score_one("", "a", timeout_s=60.0), float)


async def test_files_that_change_are_not_scored_with_as_if_they_had_not(poisoned):
    """Killed, as the kernel does when memory runs out, it comes back only with the model that it had."""
    file = Path(poisoned._spec.model) / "model.safetensors"
    before = file.read_bytes()
    version, wanted = poisoned.version, await score(poisoned, *GOOD)
    weights = load_file(file)
    weights["score.weight"] += 1.0
    save_file(weights, file, metadata={"format": "pt"})
    os.kill(poisoned._process.pid, signal.SIGKILL)
    await until(lambda: "it ended: killed by SIGKILL, as the kernel does when memory runs" in poisoned.health())
    waiting = asyncio.create_task(score(poisoned, *GOOD))
    await until(lambda: "have changed since they were first loaded" in poisoned.health())
    assert {outcome.reason for outcome in await waiting} == {"unreachable"}
    file.write_bytes(before)
    await until(lambda: poisoned.health() == "ok")
    assert await score(poisoned, *GOOD) == pytest.approx(wanted, abs=1e-5)
    assert poisoned.version == version


async def test_a_model_without_its_head_does_not_load(tmp_path):
    """Transformers would fill the head with noise."""
    scorer = build(save_victim(tmp_path / "model"))
    await scorer.start()
    assert "lacks weights of a GPT2ForSequenceClassification: score.weight" in scorer.health()
    failed = (await score(scorer, "a"))[0]
    assert failed.reason == "unreachable"
    assert "lacks weights" in failed.detail
    await scorer.close()
    assert (await score(scorer, "a"))[0].reason == "unreachable"


async def until(reached):
    async with asyncio.timeout(200):
        while not reached():
            await asyncio.sleep(0.01)


async def test_loading_has_a_deadline(tmp_path):
    process = ModelProcess(spec_of(save_reward_model(tmp_path)), load_timeout_s=0.01)
    await process.start()
    assert "its models were not loaded within 0.01 s" in process.health()
    await process.close()
    assert process.pid is None


async def test_the_process_ends_when_its_service_is_gone(tmp_path):
    """Its stdin ends, as it does when the service is killed."""
    process = ModelProcess(spec_of(save_reward_model(tmp_path)), load_timeout_s=100.0)
    begun = asyncio.create_task(process.start())
    while process.pid is None:
        await asyncio.sleep(0.01)
    assert process._child is not None
    process._child._stdin.close()
    await begun
    assert "it ended: exit code 0" in process.health()
    await process.close()
