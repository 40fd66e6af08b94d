r"""The numbers in what math-verify has read: whether they are values at all, and whether two answers differ in one.

math-verify calls two things equal when sympy simplifies their difference to 0, and sympy's algebra holds for finite
numbers only: 5 - 308^{\infty} e becomes 0, and so does any number minus it. Hence it is not asked about an answer
with an infinite or undefined number anywhere, unless gold has such a number too, nor about two answers that differ in a
number. Elsewhere: what is equal (math_grader.py).
"""

from collections.abc import Iterator
from typing import Any

from sympy import (
    AccumBounds,
    Equality,
    Expr,
    FiniteSet,
    Function,
    Interval,
    MatrixBase,
    Pow,
    Tuple,
    UnevaluatedExpr,
    Union,
    nan,
    oo,
    preorder_traversal,
    zoo,
)
from sympy.core.relational import Relational

DIGITS = 30
INFINITE, UNDEFINED = "infinite", "undefined"
NONFINITE = (oo, -oo, zoo, nan, AccumBounds)
UNEVALUATED = (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError)
COLLECTIONS = (FiniteSet, Tuple, Union)


def adds_nonfinite(gold: Any, answer: Any) -> bool:
    """Tells whether an answer has an infinite or undefined number where gold has none, as written or once evaluated.

    An interval or an inequality may be unbounded. Where gold has an infinity, an answer may have one in other places,
    but only a written one: an expression that evaluates to infinity counts as undefined.
    """
    return not _nonfinite(answer, counts_bounds=False) <= _nonfinite(gold, counts_bounds=True)


def _nonfinite(read: Any, counts_bounds: bool) -> set[str]:
    """INFINITE and UNDEFINED where some of its numbers are; `counts_bounds`: also the bounds of intervals."""
    if isinstance(read, Expr):
        return _nonfinite_number(read)
    is_bounded = isinstance(read, Interval) or (isinstance(read, Relational) and not isinstance(read, Equality))
    parts = read.flat() if isinstance(read, MatrixBase) else getattr(read, "args", ())
    parts = [part for part in parts if counts_bounds or not is_bounded or part not in (oo, -oo)]
    return set().union(*(_nonfinite(part, counts_bounds) for part in parts))


def _nonfinite_number(number: Expr) -> set[str]:
    if number in (oo, -oo):
        return {INFINITE}
    if any(map(_has_no_value, preorder_traversal(number))):
        return {UNDEFINED}
    try:
        return {UNDEFINED} if number.doit().has(*NONFINITE) else set()  # x/(x - x) has no value either
    except UNEVALUATED:
        return {UNDEFINED}


def _has_no_value(node: Any) -> bool:
    r"""Tells whether this, or a power or function of numbers here, is infinite or undefined: \log 0, \tan(\pi/2)."""
    if node in NONFINITE or isinstance(node, AccumBounds):
        return True
    if not isinstance(node, Pow | Function) or not node.is_number:
        return False
    if isinstance(node, Pow) and node.exp.is_Rational and node.base.is_Rational and node.base != 0:
        return False
    return not is_finite(value_of(node))


def value_of(number: Expr) -> Expr:
    """A number with DIGITS digits; nan where sympy cannot evaluate it."""
    try:
        return number.doit().evalf(DIGITS)
    except UNEVALUATED:
        return nan


def is_finite(value: Expr) -> bool:
    """Tells whether a value is neither infinite nor undefined; one that stays unevaluated is taken for finite."""
    return value.is_finite is not False and not value.has(*NONFINITE)


def are_far_apart(gold: Any, answer: Any, decimals: int) -> bool:
    """Tells whether a number of either is not close to any number of the other, so that they cannot be equal.

    Compared are numbers in closed form that stand alone, in a set, a list, a tuple, a matrix, as bounds of an interval
    or behind "x =". To so many decimals, below 0.1 to as many significant digits.
    """
    sides = [[None if leaf is None else value_of(leaf) for leaf in _leaves(side)] for side in (gold, answer)]
    return _has_unmatched(*sides, decimals) or _has_unmatched(*reversed(sides), decimals)


def _has_unmatched(numbers: list[Expr | None], others: list[Expr | None], decimals: int) -> bool:
    """Tells whether one of the others is close to none of the numbers; never where one of those cannot be compared."""
    if None in numbers:
        return False
    return any(other is not None and not any(_may_be_equal(x, other, decimals) for x in numbers) for other in others)


def _leaves(read: Any) -> Iterator[Expr | None]:
    """The numbers that stand alone, and None for anything that cannot be compared with a number."""
    if isinstance(read, MatrixBase):
        parts = read.flat()
    elif isinstance(read, COLLECTIONS):
        parts = read.args
    elif isinstance(read, Interval):
        parts = [read.start, read.end]
    elif isinstance(read, Equality) and read.lhs.is_Symbol:
        parts = [read.rhs]
    else:  # a percentage is unevaluated: 9% equals both 0.09 and 9
        is_number = isinstance(read, Expr) and read.is_number and not read.has(UnevaluatedExpr)
        yield read if is_number else None
        return
    for part in parts:
        yield from _leaves(part)


def _may_be_equal(one: Expr, other: Expr, decimals: int) -> bool:
    if not (is_finite(one) and is_finite(other)):
        return one == other
    if not all(part.is_Number for side in (one, other) for part in side.as_real_imag()):
        return True
    return bool(abs(one - other) <= 10.0**-decimals * min(1, 10 * abs(one)))
