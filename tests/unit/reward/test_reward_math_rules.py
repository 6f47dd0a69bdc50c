"""The maths scorer: rules, and two lists of recorded verdicts."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Basic, Function, Integer, Rational, Symbol, sqrt
from tba_reward.math.equivalence import differ_somewhere, normalize, same_rational, same_value
from tba_reward.math.extraction import after_reasoning, boxed_answer, find_boxes
from tba_reward.math.grader import MAX_ANSWER_CHARS, score, warm_up
from tba_reward.math.numbers import plain_number, same_collection, same_number
from tba_reward.math.text_answers import is_words, same_in_base, same_time_of_day, same_words
from tba_reward.scorer import Item, Outcome, outcome_of, params_of

from tba.config.reward import MathSpec
from tests.support.maths_pairs import Pair, hard_pairs, math_verify_cases, scorer_verdict
from tests.support.reward_scorers import verdict

# ---- Kind `math`: finding the answer, and which answers are right, wrong, or have no score --------------------------


PARAMS = params_of(MathSpec(kind="math"))


def scored(response: str, gold: object = "42", extract: str = "boxed") -> Outcome:
    return outcome_of(score, Item(prompt="", response=response, data={"answer": gold}), {**PARAMS, "extract": extract})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed {1}", "1"),
        (r"\fbox{1}", "1"),
        (r"\boxed 7", "7"),
        (r"\boxed{\frac{1}{2}} and so on", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{3}}", "{3}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$\boxed{1}$, $\boxed{2}$ or $\boxed{3}$", "1, 2, 3"),
        (r"\boxed{0} first. \boxed{1} \text{ and } \boxed{2}", "1, 2"),
        (r"\boxed{1}\boxed{2}", "2"),
        ("\\boxed{1}\n\\boxed{1}", "1"),
        (r"\boxed{12$ \boxed{13}", "13"),
        (r"\boxed{12} and \boxed{1", "12"),
        (r"\boxed{1", None),
        (r"\boxed", None),
        (r"\boxedly{1}", None),
        ("", None),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def test_reasoning_holds_no_answer() -> None:
    assert after_reasoning("<think>a</think>b</think> c") == " c"
    assert after_reasoning("before <think> never ended") == "before "
    assert after_reasoning("a</think> b <think> c") == " b "
    assert after_reasoning("41", "Q?<think>\n") == after_reasoning("[THINK]41") == ""
    assert after_reasoning("41</think>42", "Q?<think>\n") == after_reasoning("[THINK]41[/THINK]42") == "42"
    assert scored(r"<think>\boxed{42}</think> hm") == 0.0
    assert scored(r"<think>\boxed{41}</think> \boxed{42}") == 1.0


@given(st.text(alphabet="\\boxed{}1 ,and$", max_size=200))
def test_boxes_lie_in_order_and_close_where_they_say(text: str) -> None:
    at = 0
    for box in find_boxes(text):
        assert at <= box.start < box.end <= len(text)
        at = box.end
    assert (boxed_answer(text) is None) == (not find_boxes(text))


def test_a_long_text_of_open_boxes_takes_linear_time() -> None:
    many = 100_000  # quadratic: 10^10 steps, which no deadline of this suite allows
    assert boxed_answer("\\boxed{" * many) is None
    assert boxed_answer("\\boxed{" * many + "1" + "}" * many) is not None
    assert boxed_answer("{" * many + "\\boxed{2}") == "2"


@pytest.mark.parametrize(
    "response", ["", "42", "I cannot say", r"\boxed{}", r"\boxed{ ? }", r"\boxed{...}", r"\boxed{4"]
)
def test_a_text_without_an_answer_is_wrong(response: str) -> None:
    assert scored(response) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [("so it is 42.", 1.0), ("The answer is $6 \\cdot 7$", 1.0), ("nothing", 0.0), ("", 0.0), (r"\boxed{1} 42", 0.0)],
)
def test_an_answer_may_be_anywhere_when_the_recipe_says_so(response: str, reward: float) -> None:
    assert scored(response, extract="anywhere") == reward


@pytest.mark.parametrize("gold", [None, "", "  ", True, [], [None], float("inf"), {"a": 1}])
def test_without_a_gold_answer_there_is_no_score(gold: object) -> None:
    assert verdict(scored(r"\boxed{42}", gold)) == "bad_data"


def test_a_gold_answer_may_be_a_number_or_a_whole_solution() -> None:
    assert scored(r"\boxed{42}", 42) == 1.0
    assert scored(r"\boxed{0.5}", 0.5) == 1.0
    assert scored(r"\boxed{42}", r"As $6 \cdot 7 = \boxed{42}$, it is \boxed{42}.") == 1.0
    assert (
        outcome_of(score, Item(prompt="", response=r"\boxed{1}", data={"gold": "1"}), {**PARAMS, "field": "gold"})
        == 1.0
    )


@pytest.mark.parametrize(
    ("gold", "verdicts"),
    [
        (1e-07, {r"10^{-7}": 1.0, r"1\times 10^{-7}": 1.0, "0.0000001": 1.0, "1e-7": 1.0, "1E-07": 1.0}),
        (1e-07, {"e-7": 0.0, "e - 7": 0.0, "0": 0.0, "-4.28": 0.0}),
        (1e22, {"10^{22}": 1.0, "1" + "0" * 22: 1.0, "10^{21}": 0.0}),
        (2 / 3, {r"\frac23": 1.0, r"\frac34": 0.0}),
        (0.1 + 0.2, {"0.3": 1.0, "0.31": 0.0}),
        # a large power of ten costs no memory
        ("1e999999999", {"10^{999999999}": 1.0, "1e999999998": 0.0, "7": 0.0}),
        ("7", {"1e999999999": 0.0, "1e-999999999": 0.0}),
        (["42", 43, "x+1"], {"42": 1.0, "43": 1.0, "1+x": 1.0, "44": 0.0}),
        (["42", "The answer is 41"], {"42": 1.0, "43": "bad_data"}),
        ("No", {"No": 1.0, "Yes": 0.0}),
        ("not", {"not": 1.0, "or": 0.0}),
        ("it is what it is, so we do not know if he or she was right", {"4": "bad_data"}),
        ("5 m", {"5": 1.0, r"5\text{ m}": 1.0, "6": 0.0}),
        ("4", {"4 per day": 1.0, "5 per day": 0.0}),
        ("3 per hour", {"3": 1.0, "4": 0.0}),
        ("10:30 p.m.", {"10:30 pm": 1.0, "10:30 am": 0.0}),
    ],
)
def test_answers_are_those_of_a_careful_reader(gold: object, verdicts: dict[str, float | str]) -> None:
    for answer, expected in verdicts.items():
        found = scored(rf"so it is \boxed{{{answer}}}.", gold)
        # the service gives 0 for what cannot be read
        assert (0.0 if verdict(found) == "ambiguous" else verdict(found)) == expected, answer


def test_a_stop_string_may_have_ended_the_answer_element() -> None:
    for finish_reason, reward in (("stop", 0.0), ("stop_string", 1.0)):
        item = Item(prompt="", response="so <answer>84", data={"answer": "84"}, finish_reason=finish_reason)
        assert outcome_of(score, item, PARAMS) == reward


@pytest.mark.parametrize("gold", [r"\frac{1}{", r"\frac{1}{0}", r"\begin{aligned}1\end{aligned}"])
def test_a_gold_answer_that_cannot_be_read_is_bad_data(gold: str) -> None:
    assert verdict(scored(r"\boxed{x+1}", gold)) == "bad_data"


@pytest.mark.parametrize("answer", [r"\frac{1}{{}", r"\begin{aligned}42\end{aligned}", r"\sum_{"])
def test_an_answer_that_cannot_be_read_is_neither_right_nor_wrong(answer: str) -> None:
    assert verdict(scored(rf"\boxed{{{answer}" + "}" * answer.count("{") + "}", "x+1")) == "ambiguous"


@pytest.mark.parametrize(
    "between", [r"\text{ or }", r" \to ", "; ", r"\text{ apples and }", r"\text{ (or) }", ",", "="]
)
def test_two_answers_in_one_box_never_win_twice(between: str) -> None:
    outcomes = [scored(rf"\boxed{{5{between}6}}", gold) for gold in ("5", "6")]
    assert outcomes.count(1.0) <= (between == "=")  # the last side of an equation is its answer


def test_an_answer_that_is_too_long_is_not_read() -> None:
    assert verdict(scored(rf"\boxed{{{'1+' * MAX_ANSWER_CHARS}1}}")) == "too_long"
    assert scored("1+" * 400_000 + r"\boxed{42}") == 1.0


def test_warming_up_needs_no_data() -> None:
    warm_up(PARAMS)
    warm_up({**PARAMS, "field": "gold", "extract": "anywhere"})


@given(st.integers(-(10**20), 10**20), st.integers(1, 10**6))
def test_fractions_are_read_exactly(over: int, under: int) -> None:
    value = Fraction(over, under)
    sign = "-" if over < 0 else ""
    for text in (f"{over}/{under}", rf"{sign}\frac{{{abs(over)}}}{{{under}}}", rf"\dfrac{{{over}}}{{{under}}}"):
        number = plain_number(text)
        assert number is not None
        assert number.value == value
    assert same_number(str(over), f"{over:,}") is True


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_decimals_are_read_exactly(value: object) -> None:
    number = plain_number(str(value))
    assert number is not None
    assert number.value == Fraction(str(value))
    assert plain_number(f"{value}\\%") is not None


NOT_PLAIN = ("", "-", ".", "1.2.3", "1,00", "12,34,567", "0,111", "x", "1/0", "1e", "e5", "1e5.5", "--1", "٣", "2^3")


@pytest.mark.parametrize("text", [*NOT_PLAIN, "1" * 200, "1 2"])
def test_what_is_not_a_plain_number(text: str) -> None:
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("1/3", "0.333333", True),
        ("1/3", "0.3333333333", True),
        ("1/3", "0.33333", False),
        ("1/3", "0.333334", False),
        ("2/3", "0.666667", True),
        ("0.333333", "0.333334", False),
        ("50\\%", "0.5", True),
        ("0.5", "50%", True),
        ("50", "0.5", False),
        ("5\\times 10^{-7}", "0.0000005", True),
        ("2\\times 10^{-7}", "0.000000", False),
        ("1\\frac{1}{2}", "1.5", True),
        ("-1\\frac{1}{2}", "-1.5", True),
        ("0.1\\overline{6}", "1/6", True),
        ("x", "1", None),
    ],
)
def test_plain_numbers_are_compared_exactly(gold: str, answer: str, same: bool | None) -> None:
    assert same_number(gold, answer) is same


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("(1,2)", r"\left( 1, 2.0 \right)", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "[1,2]", None),
        ("(1,2)", "1,2", None),
        ("[1,2)", r"[1, \frac{4}{2})", True),
        ("[1,2)", "[1,3)", False),
        ("(1,2)", "(1,2,3)", False),
        ("1,2,2", "2, 1", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        (r"\{1,2\}", r"\{2,3\}", False),
        ("1,2", "1", None),
        ("(1,000)", "(1, 0)", None),
        ("(x,2)", "(x,2)", None),
        ("(1,2),(3,4)", "(3,4),(1,2)", None),
    ],
)
def test_collections_of_plain_numbers(gold: str, answer: str, same: bool | None) -> None:
    assert same_collection(gold, answer) is same


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("1A_{12}", "1a_{12}", True),
        ("101_2", "101", True),
        ("102_2", "101_2", False),
        ("a_1", "a", None),
        ("a_2", "A_2", None),
        ("x_{12}", "y_{12}", None),
    ],
)
def test_numbers_with_a_base_are_no_variables(gold: str, answer: str, same: bool | None) -> None:
    assert same_in_base(gold, answer) is same


def test_signs_tell_a_product_of_letters_from_another() -> None:
    assert same_words("abcd-x", "abcd+x") is None
    assert same_words("abcd-x", "abce+x") is False
    assert same_words("x-axis", r"\text{the } x") is False
    assert same_words("x-axis", "x axis") is True


def test_a_long_run_of_spaces_in_an_answer_takes_linear_time() -> None:
    assert normalize("a" + " " * 100_000 + "b") == "a b"  # cubic: the suite would never end


def test_an_answer_that_needs_too_much_memory_is_no_wrong_answer() -> None:
    class Hungry(Function):
        def doit(self, **hints: object) -> Basic:
            raise MemoryError  # math-verify swallows it

    with pytest.raises(MemoryError):
        same_value((Symbol("y") + 1, "y + 1"), (Hungry(Symbol("x")), "h(x)"))


def test_infinity_may_be_a_character() -> None:
    assert scored(r"\boxed{[1, ∞)}", r"[1, \infty)") == 1.0


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_text_breaks_what_is_compared_plainly(gold: str, answer: str) -> None:
    for same in (same_number, same_collection, same_words, same_time_of_day, same_in_base):
        assert same(gold, answer) in (True, False, None)
        assert same(gold, gold) is not False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"\text{Evelyn}", True),
        (r"\text{no } \text{solution}", True),
        ("no solution", True),
        (r"\text{(C)}", True),
        (r"\text{12 cm}", False),
        (r"12 \text{ cm}", False),
        (r"\mathrm{e}", False),
        ("xyz", False),
        (r"\frac{1}{2}", False),
        ("C", False),
    ],
)
def test_what_is_words(text: str, words: bool) -> None:
    assert is_words(text) is words


def test_an_expression_that_differs_somewhere_is_another_one() -> None:
    x = Symbol("x", real=True)
    assert differ_somewhere(x**2 - 1, x**2 + 1)
    assert not differ_somewhere((x + 1) ** 2, x**2 + 2 * x + 1)
    assert not differ_somewhere(sqrt(8), 2 * sqrt(2))
    assert differ_somewhere(sqrt(8), sqrt(7))
    assert same_rational(Rational(1, 2**99), Rational(1, 2**98)) is False
    assert same_rational(Integer(4), Integer(2) ** 2) is True
    assert same_rational(x, x) is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("x+1=5", "ambiguous"),
        ("x - 2 = 5", "ambiguous"),
        ("-x = 5", "ambiguous"),
        ("x = 5", 1.0),
        ("x_1 = 5", 1.0),
        ("a+b = 5", 1.0),
        ("2+3 = 5", 1.0),
        ("P(A) = 5", 1.0),
        ("x+1 = 6", 0.0),
    ],
)
def test_an_equation_is_its_right_side_only_if_it_is_solved(answer: str, expected: float | str) -> None:
    assert verdict(scored(rf"\boxed{{{answer}}}", "5")) == expected


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="0123456789x+-*/(){}\\,.frac", max_size=12))
def test_no_answer_breaks_the_rule(answer: str) -> None:
    assert verdict(scored(rf"\boxed{{{answer}}}", r"\frac{x}{2}")) in (0.0, 1.0, "ambiguous")


# ---- Every pair of the two lists gets the recorded verdict (docs/results.md has the agreement). ---------------------


LISTS = [(hard_pairs, "boxed", 553, 41), (math_verify_cases, "anywhere", 269, 16)]


@pytest.mark.parametrize(("load", "extract", "num_pairs", "num_known"), LISTS)
def test_every_pair_gets_the_recorded_verdict(
    load: Callable[[], list[Pair]], extract: str, num_pairs: int, num_known: int
) -> None:
    pairs = load()
    others = [
        (pair.gold, pair.response[-100:], ours, pair.known or pair.verdict)
        for pair in pairs
        if (ours := scorer_verdict(pair, extract=extract)) != (pair.known or pair.verdict)
    ]
    assert others == []
    assert len(pairs) == num_pairs
    assert sum(pair.known is not None for pair in pairs) == num_known


ALONE = [
    r"\left( 3, \frac{\pi}{2} \right)",
    r"(-\infty,-8)\cup (8,\infty)",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    "odd $n$",
    "1, -2",
    "6 - 5i",
    "-1 + sqrt(3)",
    "2=x",
    "99颗",
]


@pytest.mark.parametrize("text", ALONE)
@pytest.mark.parametrize("form", ["{}", "So the answer is {}", "{}<|im_end|>"])
def test_a_response_that_is_nothing_but_the_answer_is_right(text: str, form: str) -> None:
    pair = Pair(kind="", verdict="right", gold=text, response=form.format(text))
    assert scorer_verdict(pair, extract="anywhere") == "right"


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("1,2", "1,3"),
        ("6 - 5i", "6 - 4i"),
        ("odd $n$", "even $n$"),
        ("5", "答案是5万"),
        ("5", "答案是百分之5"),
        ("42", "4</s>2"),
    ],
)
def test_a_response_that_is_nothing_but_another_answer_is_not(gold: str, response: str) -> None:
    assert scorer_verdict(Pair(kind="", verdict="", gold=gold, response=response), extract="anywhere") != "right"


def test_a_gold_answer_is_its_own_answer() -> None:
    pairs = [pair for pair in hard_pairs() if pair.verdict != "unknown"]
    for gold in sorted({pair.gold for pair in pairs}):
        itself = Pair(kind="", verdict="right", gold=gold, response=f"so \\boxed{{{gold}}}.")
        assert scorer_verdict(itself, extract="boxed") == "right", gold
