"""Gold answers and responses with a verdict from a reader or another project's tests, and the scorer's verdict.

hard_pairs.tsv           made by hand for tba: class, verdict of a careful reader, gold answer, response; a fifth field
                         is the scorer's verdict where it is known to differ. `¶` stands for a new line.
math_verify_cases.jsonl  the cases of math-verify's own tests (github.com/huggingface/Math-Verify, commit 5d148cf,
                         Apache-2.0; all parametrised cases of tests/test_*.py that compare two texts), and `known`
                         likewise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tba_reward.math.grader import score
from tba_reward.scorer import Failure, Item, outcome_of, params_of

from tba.config.reward import MathSpec

DATA = Path(__file__).resolve().parents[1] / "data" / "maths"
VERDICTS = {1.0: "right", 0.0: "wrong"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One response to one question.

    Attributes:
        kind: the class it is counted in.
        verdict: `right`, `wrong` or `unknown` (nobody could tell), as a reader or math-verify's test says.
        known: the verdict of the scorer where it is known to differ.
    """

    kind: str
    verdict: str
    gold: str
    response: str
    known: str | None = None


def hard_pairs() -> list[Pair]:
    """Return the pairs that were made by hand."""
    pairs = []
    for line in (DATA / "hard_pairs.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            kind, verdict, gold, response, *known = line.replace("¶", "\n").split("\t")
            pairs.append(
                Pair(kind=kind, verdict=verdict, gold=gold, response=response, known=known[0] if known else None)
            )
    return pairs


def math_verify_cases() -> list[Pair]:
    """Return the cases of math-verify's tests; `kind` is the test that has the case."""
    pairs = []
    for line in (DATA / "math_verify_cases.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        pairs.append(
            Pair(
                kind=case["case"].removeprefix("test_"),
                verdict="right" if case["right"] else "wrong",
                gold=case["gold"],
                response=case["pred"],
                known=case.get("known"),
            )
        )
    return pairs


def scorer_verdict(pair: Pair, *, extract: str) -> str:
    """Return the verdict of the scorer kind `math` on a pair: `right`, `wrong` or `unknown`."""
    item = Item(prompt="", response=pair.response, data={"answer": pair.gold})
    outcome = outcome_of(score, item, params_of(MathSpec.model_validate({"kind": "math", "extract": extract})))
    return "unknown" if isinstance(outcome, Failure) else VERDICTS[outcome]
