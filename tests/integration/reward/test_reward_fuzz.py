"""Requests made from the OpenAPI document of the reward service; see test_buffer_fuzz.py."""

from __future__ import annotations

import pytest
from schemathesis import Case
from tba_reward.app import build_app

from tests.support.buffer import make_recipe
from tests.support.fuzz import fuzz, load_schema, operations

DOCUMENT = build_app(make_recipe(), tokens=None).openapi()
SCHEMA = load_schema(DOCUMENT)


def known_task(case: Case) -> None:
    items = case.body["items"] if isinstance(case.body, dict) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            item.update(task="addition", data={"answer": 4})


@pytest.mark.parametrize(("path", "method"), operations(DOCUMENT))
def test_every_answer_is_documented_and_every_error_is_a_problem(reward_url: str, path: str, method: str) -> None:
    fuzz(SCHEMA, path, method, base_url=reward_url, max_examples=25, known=known_task)
