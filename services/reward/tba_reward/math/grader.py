r"""The rule of kind `math`: 1 if the final answer of a response is the gold answer, else 0. Runs in worker processes.

**Wrong (0)**: another value; no closed box and no answer element (unless `extract` is `anywhere`); a box that cannot
be read and holds no letter or digit. **No score**: a gold answer that is missing, prose, or cannot be read
(`bad_data`), an answer of more than MAX_ANSWER_CHARS characters (`too_long`), an answer that cannot be read or compared
(`ambiguous`). For `too_long` and `ambiguous` the service gives the recipe's `unreadable` instead, 0 by default
(`tba_reward.composite_reward`).
"""

from __future__ import annotations

import math

from tba.api.scores import ScoreReason
from tba_reward.math.equivalence import UnreadableError, UnreadableGoldError, check_gold, same_answer, same_anywhere
from tba_reward.math.extraction import after_reasoning, boxed_answer, final_answer
from tba_reward.scorer import AmbiguousError, BadDataError, Item, NoScoreError, Params, gold_answers, score_any

MAX_ANSWER_CHARS = 2000
MAX_EXACT_FLOAT = 2.0**53


class AnswerTooLongError(NoScoreError):
    """An answer is longer than MAX_ANSWER_CHARS."""

    slug = "answer-too-long"
    reason: ScoreReason = "too_long"


def score(item: Item, params: Params) -> float:
    """Return 1.0 if the answer is one of the gold answers, else 0.0.

    Raises:
        BadDataError: a gold answer cannot be read, and the answer equals no other gold answer.
        AnswerTooLongError: the answer has more than MAX_ANSWER_CHARS characters.
        AmbiguousError: the answer cannot be read as mathematics, or cannot be compared.
    """
    golds = gold_answers(item, params["field"])
    text = after_reasoning(item.response, item.prompt)
    answer = final_answer(text, is_cut_at_tag=item.finish_reason == "stop_string")
    unreadable: UnreadableError | None = None

    def is_same(value: object) -> bool:
        nonlocal unreadable
        gold = gold_text(value, params["field"])
        try:
            if answer is None:
                return params["extract"] == "anywhere" and same_anywhere(gold, text)
            return same_answer(gold, answer)
        except UnreadableGoldError as error:
            raise BadDataError(f"the gold answer in data.{params['field']}: {error}") from error
        except UnreadableError as error:
            unreadable = error
            return False

    # `check` first, here and below: a gold answer that cannot be read is to blame before the answer is
    if answer is not None and len(answer) > MAX_ANSWER_CHARS:
        check(item, params)
        raise AnswerTooLongError(f"the answer has {len(answer)} characters, the limit is {MAX_ANSWER_CHARS}")
    value = score_any(golds, is_same)
    # a box without a letter or digit is no answer at all, so that it is wrong
    if value or unreadable is None or (answer is not None and not any(char.isalnum() for char in answer)):
        return value
    check(item, params)
    raise AmbiguousError(str(unreadable)) from unreadable


def check(item: Item, params: Params) -> float:
    """Check the gold answers alone; return 0.0. A BadDataError or a timeout here shows that they are to blame."""
    for value in gold_answers(item, params["field"]):
        try:
            check_gold(gold_text(value, params["field"]))
        except UnreadableError as error:
            raise BadDataError(f"the gold answer in data.{params['field']}: {error}") from error
    return 0.0


def gold_text(value: object, field: str) -> str:
    r"""Return a gold answer as text: a number's digits, the content of a text's last `\boxed{...}`, else the text."""
    if isinstance(value, float) and math.isfinite(value):
        is_whole = value.is_integer() and abs(value) < MAX_EXACT_FLOAT
        return str(int(value)) if is_whole else f"{value:.15g}"  # 15 digits are exact in every double: 0.1 + 0.2 is 0.3
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise BadDataError(f"data needs `{field}`, the gold answer as a text, got {value!r:.200}")
    return boxed_answer(value) or value


def warm_up(params: Params) -> None:
    """Grade some answers, so that math-verify loads its grammar and compiles its expressions before the first item."""
    for response in (r"\boxed{\frac{x^2+1}{2}}", r"\boxed{[1, 2)}", r"\boxed{x = 1 + \sqrt{2}}"):
        for gold in (r"x^2 + \frac{1}{2}", r"[1, 2]"):
            score(Item(prompt="", response=response, data={params["field"]: gold}), params)
