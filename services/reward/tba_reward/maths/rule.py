r"""The rule of kind `math`: 1 if the final answer of a response is the gold answer, else 0. Runs in worker processes.

Right and wrong need an answer that can be read. **Wrong (0)**: another value; no closed box (unless `extract` is
`anywhere`); a box that cannot be read and
holds no letter or digit. **No score**: a gold answer that is missing or cannot be read (`bad_data`),
an answer of more than MAX_ANSWER_CHARS characters (`too_long`), an answer in a box that math-verify cannot read or
compare (`ambiguous`).
"""

from __future__ import annotations

from tba.api.scores import ScoreReason
from tba_reward.maths.comparing import UnreadableError, UnreadableGoldError, same_answer, same_anywhere
from tba_reward.maths.extraction import after_reasoning, boxed_answer
from tba_reward.scorers.base import AmbiguousError, BadDataError, Item, NoScoreError, Params

MAX_ANSWER_CHARS = 2000


class AnswerTooLongError(NoScoreError):
    """An answer is longer than any answer is."""

    slug = "answer-too-long"
    reason: ScoreReason = "too_long"


def score(item: Item, params: Params) -> float:
    """1.0 if the answer is the gold answer, else 0.0.

    Raises:
        BadDataError: there is no gold answer that can be read.
        AnswerTooLongError: the answer has more than MAX_ANSWER_CHARS characters.
        AmbiguousError: the answer cannot be read as mathematics or not be compared.
    """
    gold = gold_answer(item, params["field"])
    text = after_reasoning(item.response)
    answer = boxed_answer(text)
    try:
        if answer is None:
            return float(params["extract"] == "anywhere" and same_anywhere(gold, text))
        if len(answer) > MAX_ANSWER_CHARS:
            raise AnswerTooLongError(f"the answer has {len(answer)} characters, the limit is {MAX_ANSWER_CHARS}")
        return float(same_answer(gold, answer))
    except UnreadableGoldError as error:
        raise BadDataError(f"the gold answer in data.{params['field']}: {error}") from error
    except UnreadableError as error:
        if answer is not None and not any(char.isalnum() for char in answer):
            return 0.0
        raise AmbiguousError(str(error)) from error


def gold_answer(item: Item, field: str) -> str:
    r"""The gold answer: a number, a text, or a solution that ends in a `\boxed{...}`.

    Raises:
        BadDataError: the data has none.
    """
    value = item.data.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    if not isinstance(value, str) or not value.strip():
        raise BadDataError(f"data needs `{field}`, the gold answer as a text, got {value!r:.200}")
    return boxed_answer(value) or value


def warm_up(params: Params) -> None:
    """Read and compare what makes math-verify load its grammar and compile its expressions."""
    for response in (r"\boxed{\frac{x^2+1}{2}}", r"\boxed{[1, 2)}", r"\boxed{x = 1 + \sqrt{2}}"):
        for gold in (r"x^2 + \frac{1}{2}", r"[1, 2]"):
            score(Item(prompt="", response=response, data={params["field"]: gold}), params)
