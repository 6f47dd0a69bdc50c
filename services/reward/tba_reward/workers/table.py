"""The rules that a worker process, or the nursery for all of them, has loaded."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

from tba_reward.scorers.base import BatchRule, Failure, Item, Outcome, Params, Rule, outcome_of
from tba_reward.workers.messages import ItemMessage, Prepare, Score, Share


class RuleTable:
    """Rules by their number."""

    def __init__(self) -> None:
        self._rules: dict[int, tuple[BatchRule, Params]] = {}
        self._errors: dict[int, str] = {}

    def prepare(self, message: Prepare | Share) -> str | None:
        """Import a rule and run what prepares it: None, or what went wrong."""
        self._errors.pop(message.rule, None)
        try:
            params = json.loads(message.params_json)
            rule = find(message.function)
            if message.prepare is not None:
                find(message.prepare)(params)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # foreign code may raise anything; it is reported
            self._errors[message.rule] = f"{message.function} could not be loaded: {type(error).__name__}: {error}"
            return self._errors[message.rule]
        is_batch = isinstance(message, Prepare) and message.is_batch  # what is shared is our own: none of it is
        self._rules[message.rule] = (rule if is_batch else _one_by_one(rule), params)
        return None

    def outcomes(self, message: Score) -> list[Outcome]:
        """Apply a rule to items."""
        found = self._rules.get(message.rule)
        if found is None:
            return [Failure("exception", self._errors.get(message.rule, "its rule was not loaded"))] * len(
                message.items
            )
        rule, params = found
        return rule([_item(item) for item in message.items], params)


def _one_by_one(rule: Rule) -> BatchRule:
    return lambda items, params: [outcome_of(rule, item, params) for item in items]


def _item(message: ItemMessage) -> Item:
    return Item(
        prompt=message.prompt,
        response=message.response,
        data=json.loads(message.data_json),
        finish_reason=message.finish_reason,
        response_tokens=message.response_tokens,
    )


def find(name: str) -> Callable[..., Any]:
    """The function that `module:name` names.

    Raises:
        ValueError: there is no such function; or whatever the import of the module raises.
    """
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if not callable(found):
        raise ValueError(f"module {module} has no function {attribute!r}")
    return found
