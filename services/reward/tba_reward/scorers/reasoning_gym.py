"""Kind `reasoning_gym`: the own rule of a data set of reasoning-gym, in worker processes.

**Full marks or nothing**, unless the recipe says `partial`: many rules pay for junk, or a text with the answer in it.
**No text runs as code.** Rules that would `eval` it read literals. Rules with sympy's `parse_expr` get only formulas.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import lru_cache
from typing import Any

from tba.config.data import REFUSED_GYMS
from tba.config.reward import ReasoningGymSpec
from tba_reward import scorer
from tba_reward.math.extraction import after_reasoning
from tba_reward.process_pool.job import WorkerRule
from tba_reward.scorer import AmbiguousError, BadDataError, Item, Params
from tba_reward.scorers import Tools
from tba_reward.scorers.in_process_pool import ProcessPoolScorer
from tba_reward.scorers.last_number import last_number

IMPLEMENTATION = 1
_FORMULAS = ("bitwise_arithmetic", "countdown", "polynomial_multiplication", "simple_integration")
"""Data sets whose rules evaluate formulas, of the answer or of the entry."""
_CODE = re.compile(r"\b[^\W\d]\w|['\"]|[^\0-\x7f]")
"""What code needs, and no formula: words of two letters and more, strings, letters that Python reads as others."""


def build(spec: ReasoningGymSpec, tools: Tools) -> scorer.Scorer:
    """Return the scorer; the library is imported in worker processes only."""
    releases = [scorer.installed_version(spec.kind, name) for name in ("reasoning-gym", "sympy")]
    params, load = scorer.params_of(spec), f"{__name__}:load"
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    return ProcessPoolScorer(
        WorkerRule(function=f"{__name__}:score", params=params, prepare=load),
        pool=tools.pool,
        timeout_s=spec.timeout_s,
        version=scorer.version_of(spec, IMPLEMENTATION, *releases),  # another release may score otherwise
        example=Item(prompt="", response="<answer>3</answer>" if spec.extract == "tag" else "3", data=entry),
        check=WorkerRule(function=f"{__name__}:check", params=params, prepare=load),
    )


def load(params: Params) -> None:
    """Import the library, which takes seconds."""
    _dataset("chain_sum", "{}")


def score(item: Item, params: Params) -> float:
    """Return the score of the answer in a response, 0.0 without one; AmbiguousError if the rule raises for it."""
    dataset, entry = _entry(item)
    answer = _answer(item, params["extract"])
    if answer is None or not _is_safe(entry, answer):
        return 0.0
    try:
        value = float(dataset.score_answer(answer, entry))
    except Exception as error:  # the rules are foreign code
        raise AmbiguousError(f"the rule raised {type(error).__name__}: {error}") from error
    return min(value, 1.0) if params["partial"] else float(value == 1.0)


def check(item: Item, params: Params) -> float:
    """Return 0.0; a BadDataError, or a timeout, shows that the data is to blame, and not the response."""
    _entry(item)
    return 0.0


def _entry(item: Item) -> tuple[Any, dict[str, Any]]:
    """Return the data set of an item's prompt, and its entry as the rule takes it; it can score its own answer."""
    try:
        entry = {key: item.data[key] for key in ("question", "answer", "metadata")}
        name, metadata = entry["metadata"]["source_dataset"], entry["metadata"]
        dataset = _dataset(name, json.dumps(item.data.get("options", {})))
        if name in ("arc_agi", "rearc"):  # the rule compares with tuples, which JSON does not have
            entry["metadata"] = metadata | {"output": tuple(map(tuple, metadata["output"]))}
        for text in (entry["answer"], metadata.get("integrand", 0), metadata.get("problem", 0)):
            if not _is_safe(entry, text):  # a client of the service may have written it
                raise ValueError(f"{text!r:.80} is no formula")
        dataset.score_answer(entry["answer"], entry)
    except Exception as error:  # each data set checks its own options, and raises anything
        raise BadDataError(f"data is no entry of reasoning-gym: {type(error).__name__}: {error}") from error
    return dataset, entry


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    """Return a data set for its rule, which may depend on the options."""
    from reasoning_gym.factory import create_dataset

    if name in REFUSED_GYMS:
        raise ValueError(REFUSED_GYMS[name])
    dataset = create_dataset(name, **json.loads(options) | {"seed": 0, "size": 1})
    if name not in _FORMULAS:  # a name of the module comes before the built-in one
        vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
    return dataset


def _answer(item: Item, extract: str) -> str | None:
    text = after_reasoning(item.response, item.prompt)
    if extract == "whole":
        return text.strip()
    if extract == "last_number":
        number = last_number(text)
        # 3.0 is 3, which some rules compare as text
        return None if number is None else re.sub(r"\.0*$", "", f"{number:f}")
    # the stop string was the end tag, which is not part of the response then
    is_open = item.finish_reason == "stop_string" and "<answer>" in text.rpartition("</answer>")[2]
    found = re.findall(r"<answer>(.*?)</answer>", f"{text}</answer>" if is_open else text, re.DOTALL)
    return found[-1].strip() if found else None


def _is_safe(entry: dict[str, Any], text: object) -> bool:
    """Return whether the rule may get a text: no code for a formula, and no NaN where it is taken for any number."""
    name, text = entry["metadata"]["source_dataset"], str(text)
    takes_nan = name in ("complex_arithmetic", "number_sorting")
    return not (name in _FORMULAS and _CODE.search(text)) and not (takes_nan and "nan" in text.lower())
