"""What can be said of two expressions of sympy quickly and surely, before anything tries to simplify them."""

from __future__ import annotations

from typing import Any

from sympy import Add, Basic, Equality, Expr, Float, I, MatrixBase, Mul, Rational, Symbol, UnevaluatedExpr
from sympy.core.evalf import PrecisionExhausted

_POINTS = ((Rational(7312, 10_000), Rational(10_871, 10_000)), (Rational(21_934, 10_000), Rational(5317, 10_000)))
"""The variables, in the order of their names, get the first number, then the second times as much, and so on."""
_DIGITS = 15
_CLEARLY = 1e-6
"""A relative difference that no rounding of 15 digits makes."""


def with_imaginary_unit(part: Any) -> Any:
    """The same with the imaginary unit for the letter `i`, which math-verify reads as any other letter."""
    if not isinstance(part, Basic | MatrixBase):
        return part
    letters = {symbol: I for symbol in part.free_symbols if str(symbol) == "i"}
    return part.subs(letters) if letters else part


def same_exactly(gold: Any, answer: Any) -> bool | None:
    """Two expressions that are rational numbers, by value; None if one is not one or stands for a percentage.

    math-verify takes 1/2^99 for 1/2^98: it looks at 15 digits of the difference. Decimals that are the same number are
    the same (`0.1+0.2` is 0.3), those that are not may still agree when they are rounded.
    """
    if not (_is_expression(gold) and _is_expression(answer)) or gold.free_symbols or answer.free_symbols:
        return None
    left, right = _with_fractions(gold).doit(), _with_fractions(answer).doit()
    if not (left.is_Rational and right.is_Rational):
        return None
    return left == right or (None if gold.has(Float) or answer.has(Float) else False)


def _with_fractions(expression: Basic) -> Basic:
    """With an exact fraction for each decimal."""
    if not expression.has(Float):
        return expression
    return expression.replace(lambda part: part.is_Float, lambda part: Rational(str(part)))


def differ_somewhere(gold: Any, answer: Any) -> bool:
    """Whether two exact expressions clearly have different values at some point: then they are not the same.

    A milliseconds' work that saves the tens of milliseconds of a simplification that comes to nothing.
    """
    if not (_is_exact(gold) and _is_exact(answer)) or isinstance(gold, Symbol) or isinstance(answer, Symbol):
        return False  # a word in LaTeX is one symbol on one side and a product of letters on the other
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for first, factor in _POINTS:
        point: dict[Basic, Basic | float] = {name: first * factor**place for place, name in enumerate(names)}
        left, right = _value(gold, point), _value(answer, point)
        if left is None or right is None:
            return False
        if abs(left - right) > _CLEARLY * max(abs(left), abs(right)):
            return True
        if not names:
            return False
    return False


def is_unsolved(part: Any) -> bool:
    """An equation whose left side is a sum or product of something unknown and a number: `x+1=5`, not `a+b=5`.

    math-verify takes its right side for the answer, whatever stands on the left.
    """
    if not isinstance(part, Equality) or not part.lhs.free_symbols:
        return False
    return isinstance(part.lhs, Add | Mul) and any(each.is_Number for each in part.lhs.args)


def _is_expression(part: Any) -> bool:
    """An expression (no set, tuple, relation, matrix) without percent signs."""
    return isinstance(part, Expr) and not part.has(UnevaluatedExpr)


def _is_exact(part: Any) -> bool:
    """An expression without decimals."""
    return _is_expression(part) and not part.has(Float)


def _value(expression: Expr, point: dict[Basic, Basic | float]) -> Expr | None:
    """None also where all digits cancel out: it may be 0 (`x^2-x^2`), and no relative difference tells."""
    try:
        value = expression.evalf(_DIGITS, subs=point, strict=True)
    except (PrecisionExhausted, TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return None
    real, imaginary = value.as_real_imag()
    return value if real.is_Number and imaginary.is_Number and value.is_finite else None
