"""The state of a run: its notes and its live settings."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from tba_buffer.run.components import ABSENT_AFTER_S, absent_trainer
from tba_buffer.run.settings import Settings, read_settings
from tba_buffer.storage import keys
from tba_buffer.storage.context import SCRIPT_NAMES, script_text

from tba.api import ComponentInfo, RunState
from tba.errors import ConfigError
from tests.support.trainer_values import make_recipe


def trainer(component_id: str, age_s: float, kind: str = "trainer") -> ComponentInfo:
    who: Any = {"component_id": component_id, "kind": kind, "state": "training", "version": None, "gauges": {}}
    return ComponentInfo(**who, alive=age_s < 15, heartbeat_age_s=age_s)


def note(
    *components: ComponentInfo, state: RunState = "running", had_trainer: bool = True, watched_s: float = 1e4
) -> str | None:
    return absent_trainer(state, 41, components, had_trainer=had_trainer, watched_s=watched_s)


def test_the_newest_trainer_that_is_silent_is_named_with_age_and_step() -> None:
    assert note(trainer("t-1", 900.0), trainer("t-2", 312.4), trainer("s-1", 1.0, "searcher")) == (
        "no trainer: t-2 was last heard from 312 s ago, step 41; "
        "look at the trainer's log, on Kubernetes at its Job and pods"
    )
    assert note(trainer("t-1", 900.0), trainer("t-2", ABSENT_AFTER_S)) is None
    assert note(trainer("t-1", 900.0), watched_s=ABSENT_AFTER_S) is None, "it may be this buffer that was away"


def test_none_that_ever_came_and_one_that_is_forgotten_are_told_apart() -> None:
    assert (note() or "").startswith("no trainer: none was heard from for 1 h, step 41; ")
    assert (note(had_trainer=False, watched_s=70.0) or "").startswith(
        "no trainer: none has come since the buffer started 70 s ago; "
    )
    assert note(had_trainer=False, watched_s=ABSENT_AFTER_S) is None


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_run_that_is_over_needs_none(state: RunState) -> None:
    assert note(trainer("t-1", 900.0), state=state) is None


class Answers:
    """Redis with these answers, the first of which comes long after it was made."""

    def __init__(self, *answers: dict[bytes, bytes]) -> None:
        self.answers, self.is_first = list(answers), True

    async def hgetall(self, name: str) -> dict[bytes, bytes]:
        answer, is_first, self.is_first = self.answers.pop(0), self.is_first, False
        for _ in range(50 if is_first else 0):
            await asyncio.sleep(0)
        return answer


KEYS: Any = SimpleNamespace(settings="settings")


def test_an_answer_that_comes_late_does_not_put_an_older_revision_back() -> None:
    redis = Answers(*({b"revision": b"%d" % n, b"value:beta": b"0.%d" % n} for n in (1, 2)))
    context: Any = SimpleNamespace(redis=redis, keys=KEYS, recipe=make_recipe("model"))

    async def both() -> Settings:
        settings = Settings(context)
        await asyncio.gather(settings.load(), settings.load())
        return settings

    assert asyncio.run(both()).revision == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"-1", r"'beta\.value' has the value -1"),
        (b'{"value": 1, "shape": "line"}', r"unknown key 'beta\.shape'"),
        (b"{", "Expecting"),
    ],
)
def test_a_stored_value_that_this_release_cannot_read_is_one_sentence(value: bytes, message: str) -> None:
    redis: Any = Answers({b"revision": b"3", b"value:beta": value})
    with pytest.raises(ConfigError, match=rf"live settings \(revision 3\) .* cannot read: .*{message}") as caught:
        asyncio.run(read_settings(redis, KEYS, make_recipe("model")))
    assert "\n" not in str(caught.value)


def test_every_key_that_a_script_names_is_described() -> None:
    texts = "".join(script_text(name) for name in SCRIPT_NAMES)
    named = set(re.findall(r"key\('(\w+):?'", texts))
    table = re.sub(r"_ +\|.*\n\| ", "_", keys.__doc__ or "")  # long names take two lines
    described = set(re.findall(r"^\| (\w+)", table, re.MULTILINE))
    assert len(named) > 30
    assert named <= described
