"""Checks after the end of a run, against the records of the observer."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis

from tba.api import LedgerEntry, RunInfo, Stats
from tba.wire import Rollout, decode_rollouts
from tba_cli.reports.ledger import batch_entries, ledger_lines
from tests.support.buffer import SERVICE_PATHS
from tests.system.chaos.deployment import EPISODE_TURNS, RUN, Deployment
from tests.system.chaos.observer import DIGEST_BYTES, Acked, Observer

CHECK_S = 120.0


@dataclass
class Verdict:
    """`wrong` is empty when every promise was kept; `counts` is what was compared."""

    wrong: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)

    def expect(self, condition: bool, sentence: str) -> None:
        if not condition:
            self.wrong.append(sentence)


def judge(world: Deployment, info: RunInfo) -> Verdict:
    """Everything that can be judged from outside. The buffer and Redis still run."""
    verdict, stats = Verdict(), world.client.stats()
    verdict.expect(info.state == "done", f"the run ended as {info.state!r} ({info.state_reason}), not done")
    with Redis.from_url(world.redis_url) as redis:
        stored: dict[bytes, bytes] = redis.hgetall(f"tba:{RUN}:payloads")  # pyright: ignore
    judge_rollouts(verdict, world.observer, stored, stats)
    entries = batch_entries(list(ledger_lines(world.client)))
    judge_steps(verdict, world.observer.acks, entries)
    _judge_ledger(verdict, world)
    _judge_model(verdict, world)
    for relay in (world.buffer_relay, world.store_relay):
        verdict.wrong += [f"the relay could not read: {text}" for text in relay.errors[:3]]
    verdict.wrong += [f"the observer could not read: {text}" for text in world.observer.errors[:3]]
    verdict.counts |= {"steps": info.step, "trainer starts": info.lineage, "version": info.latest_version}
    return verdict


def judge_rollouts(verdict: Verdict, observer: Observer, stored: Mapping[bytes, bytes], stats: Stats) -> None:
    """Nothing acknowledged is lost, changed, or there twice; nothing was evicted, because no bound was ever near."""
    lost = observer.rollouts.keys() - stored.keys()
    changed = [
        rollout_id
        for rollout_id, digest in observer.rollouts.items()
        if digest is not None and rollout_id in stored and _digest(stored[rollout_id]) != digest
    ]
    num_evicted = sum(stats.evicted.values())
    verdict.expect(not lost, f"{len(lost)} acknowledged rollouts are lost, for example {_names(lost)}")
    verdict.expect(not changed, f"{len(changed)} acknowledged rollouts have other bytes, for example {_names(changed)}")
    verdict.expect(num_evicted == 0, f"{num_evicted} rollouts were evicted, and no bound was near")
    twice = observer.twice_new
    verdict.expect(not twice, f"{len(twice)} rollouts were acknowledged as new twice, for example {twice[:3]}")
    played = [each for each in decode_rollouts([*stored.values()]) if isinstance(each, Rollout) and each.episode]
    half = [each.rollout_id.hex() for each in played if is_half(each)]
    verdict.expect(not half, f"{len(half)} stored episodes are not whole, for example {half[:3]}")
    counted = stats.rollouts_generated
    verdict.expect(counted == len(stored), f"{len(stored)} rollouts are stored, and the buffer counted {counted} new")
    verdict.expect(stats.num_rollouts == len(stored), f"the index holds {stats.num_rollouts}, Redis {len(stored)}")
    verdict.expect(stats.num_pending == 0, f"{stats.num_pending} rollouts still wait for a score")
    verdict.counts |= {
        "acknowledged rollouts": len(observer.rollouts),
        "of those pushed without a score": sum(digest is None for digest in observer.rollouts.values()),
        "stored": len(stored),
        "of those episodes": len(played),
        "lost": len(lost),
        "pushed again (duplicates)": observer.outcomes["duplicate"],
        "refused": observer.outcomes["refused"],
        "failed scores": stats.num_failed,
    }


def is_half(rollout: Rollout) -> bool:
    """Return whether an episode that its environment ended lacks replies."""
    episode = rollout.episode
    return episode is not None and episode.stop_condition == "done" and rollout.num_replies != EPISODE_TURNS


def judge_steps(verdict: Verdict, acks: list[Acked], entries: list[LedgerEntry]) -> None:
    """Check that every acknowledged step stands in the ledger, once, with its batch."""
    lines: dict[tuple[int, int], list[str]] = {}
    for entry in entries:
        lines.setdefault((entry.lineage, entry.step), []).append(entry.batch_id)
    wrong = [acked for acked in acks if lines.get((acked.lineage, acked.step)) != [acked.batch_id]]
    examples = [f"{acked.lineage}-{acked.step} {acked.batch_id}" for acked in wrong[:3]]
    verdict.expect(not wrong, f"{len(wrong)} acknowledged steps are not in the ledger as they were told: {examples}")
    verdict.counts |= {"acknowledged steps": len(acks), "ledger lines": len(entries)}


def _judge_ledger(verdict: Verdict, world: Deployment) -> None:
    checked = run_tba(world, "ledger", "check", "--url", world.buffer_url)
    verdict.counts["tba ledger check"] = checked.stdout.strip().splitlines()[-1:] or checked.stderr[-300:]
    verdict.expect(checked.returncode == 0, f"`tba ledger check` failed: {(checked.stdout + checked.stderr)[-600:]}")


def _judge_model(verdict: Verdict, world: Deployment) -> None:
    from safetensors.torch import load_file

    from tba.store import open_store

    folder = world.folder / "model"
    folder.mkdir(exist_ok=True)
    with s3_environ():
        store = open_store(world.recipe.store)
        keys = store.list(f"runs/{RUN}/export/")
        for key in keys:
            store.get_file(key, folder / key.rsplit("/", 1)[-1])
    verdict.expect((folder / "config.json").exists(), f"no final model was exported; the store has {keys}")
    if (folder / "model.safetensors").exists():
        tensors = load_file(folder / "model.safetensors")
        finite = all(bool((tensor == tensor).all()) for tensor in tensors.values())
        verdict.expect(finite and bool(tensors), "the final model holds numbers that are none")
        verdict.counts["tensors of the final model"] = len(tensors)
    else:
        verdict.wrong.append("the final model has no model.safetensors")


def tracebacks(log_folder: Path) -> dict[str, list[str]]:
    """Component -> the unexplained exceptions in its log. A service explains an error in a sentence."""
    found = {}
    for path in sorted(log_folder.glob("*.log")):
        if path.stem == "store":  # not of ours
            continue
        text = path.read_text(errors="replace")
        ends = {_last_line(block) for block in text.split("Traceback (most recent call last)")[1:]}
        ends |= {_exception(line) for line in text.splitlines() if '"exception": [' in line}
        if ends:
            found[path.stem] = sorted(ends)
    return found


def _last_line(block: str) -> str:
    end = re.search(r"^[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*$", block, re.MULTILINE)
    return end.group(0)[:300] if end else "(cut off)"


def _exception(line: str) -> str:
    last = json.loads(line)["exception"][-1]
    return f"{last['exc_type']}: {last['exc_value']}"[:300]


def run_tba(world: Deployment, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tba_cli.main", *words],
        cwd=world.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS))},
        capture_output=True,
        text=True,
        timeout=CHECK_S,
    )


def s3_environ() -> Any:
    """The credentials of the S3 server in this process's environment, for the length of a block."""
    from unittest.mock import patch

    from tests.support.s3_server import CREDENTIALS

    return patch.dict(os.environ, CREDENTIALS)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


def _names(ids: Any) -> list[str]:
    return [rollout_id.hex() for rollout_id in list(ids)[:3]]
