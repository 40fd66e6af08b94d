r"""Readings of math-verify brought to one kind: inequalities as sets of numbers, the letter i as the imaginary unit.

    x > 0, -1 < x \le 2, |x| > 3, x \ne 2    sets, beside a set or another inequality of the same letter
    x < -1 \text{ or } x > 2                 a union
    e^{i\pi}                                 -1, unless another letter says that i is an index

Inequalities are read where a letter stands alone on one side: nothing is solved.
"""

from collections.abc import Iterator
from typing import Any

from sympy import (
    Abs,
    And,
    Basic,
    EmptySet,
    Eq,
    FiniteSet,
    Gt,
    I,
    Intersection,
    Interval,
    Le,
    Lt,
    MatrixBase,
    Ne,
    Or,
    Set,
    Union,
    oo,
)
from sympy.core.relational import Relational

INDICES = frozenset("jkmn")


def as_sets(gold: Any, answer: Any, relations_are_sets: bool) -> tuple[Any, Any]:
    """Both readings as sets of numbers where one is an inequality and both can be sets; else as they are.

    A gold that is a set takes an inequality only where relations are sets.
    """
    if not _is_inequality(gold) and not (relations_are_sets and _is_inequality(answer)):
        return gold, answer
    sets = _set_of(gold), _set_of(answer)
    letters = {str(letter) for side in (gold, answer) for letter in side.free_symbols}
    return (gold, answer) if None in sets or len(letters) > 1 else sets


def _is_inequality(read: Any) -> bool:
    if isinstance(read, And | Or | FiniteSet):
        return bool(read.args) and all(map(_is_inequality, read.args))
    return isinstance(read, Relational) and not isinstance(read, Eq)


def _set_of(read: Any) -> Set | None:
    """The numbers for which an inequality holds, or a set as it is; None for what would have to be solved."""
    if isinstance(read, Eq) and read.lhs.is_Symbol and isinstance(read.rhs, Set):
        return read.rhs
    if _is_inequality(read) and not isinstance(read, Relational):
        parts = [_set_of(part) for part in read.args]
        if None in parts:
            return None
        common = Intersection(*parts)
        is_chain = isinstance(read, And) or (isinstance(read, FiniteSet) and common != EmptySet)
        return common if is_chain else Union(*parts)
    if isinstance(read, Set):
        return read
    return _half_line(read) if _is_inequality(read) else None  # x = 3 is none


def _half_line(relation: Relational) -> Set | None:
    """The numbers x for which x, or |x|, is on one side of a bound."""
    if relation.lhs.is_number:
        relation = relation.reversed
    letter, bound = relation.lhs, relation.rhs
    if not bound.is_number or not bound.is_extended_real:
        return None
    is_strict = isinstance(relation, Lt | Gt | Ne)
    if isinstance(letter, Abs) and letter.args[0].is_Symbol and bound.is_positive:
        inside, lower, upper = Interval(-bound, bound, is_strict, is_strict), -bound, bound
    elif letter.is_Symbol:
        inside, lower, upper = Interval(-oo, bound, True, is_strict), -oo, bound
    else:
        return None
    if isinstance(relation, Lt | Le):
        return inside
    outside = Interval(upper, oo, is_strict, True)
    if lower != -oo:
        outside = Union(Interval(-oo, lower, True, is_strict), outside)
    return Union(inside, outside) if isinstance(relation, Ne) else outside


def with_imaginary_unit(gold: Any, answer: Any) -> Iterator[tuple[Any, Any]]:
    """Both readings, and once more with i for the imaginary unit where it is a letter and can be no index."""
    yield gold, answer
    sides = [side for side in (gold, answer) if isinstance(side, Basic | MatrixBase)]
    letters = {letter for side in sides for letter in side.free_symbols}
    units = [letter for letter in letters if str(letter) == "i"]
    if units and not {str(letter) for letter in letters} & INDICES:
        yield tuple(side.subs(dict.fromkeys(units, I)) for side in (gold, answer))
