"""The built-in environments, in the contract of a user's class (environment_process.py): each is a short example of it.

calculator    a tool that computes an expression; the run's own reward judges the answer
repair        the agent's program is run on the cases of the row's `gold`, and comes back with its first failure
relay         adds nothing: where agents play roles, each reads the others' turns
number_game   the players take turns at guessing the number of the row's `gold`, and are told where it lies
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

from hacpo_grading.graders.program import Program
from hacpo_mega.conversations.environment_process import Responder

MAX_CHARACTERS, MAX_BITS = 200, 512
SHARE_OF_TURN = 0.8  # of a turn's time limit, for the program; the rest is for ending it and the report
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Relay:
    """A conversation of the agents alone, in the order of their roles; the run's reward judges the last turn."""

    def reset(self, **row: Any) -> None:
        """Begins a conversation; nothing is kept."""


class Calculator:
    """A tool that computes."""

    def reset(self, **row: Any) -> None:
        """Begins a conversation; nothing is kept between calls."""

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression of numbers, + - * / // % and parentheses.

        Args:
            expression: The expression, such as "12*(3+4)".
        """
        if len(expression) > MAX_CHARACTERS:
            raise ValueError(f"the expression has more than {MAX_CHARACTERS} characters")
        try:
            value = _value(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"{expression!r} is no expression") from error
        return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("only numbers, + - * / // % and parentheses are computed")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the number is too long")
    return value


class Repair(Responder):
    """A program after its tests fail: the judge of programs runs it (grading's kind `program`), and says what failed.

    A conversation ends when the program passes; its reward is 1 then and else 0. A program that takes longer over all
    cases than a turn may has failed, and is judged: a turn that overran would leave the conversation unjudged.
    """

    def __init__(self) -> None:
        self._judge = Program()
        self._gold, self._passes = "", False

    def reset(self, *, gold: str, **row: Any) -> None:
        """Begins with the cases of a data row, as the judge of programs has them."""
        self._gold, self._passes = gold, False

    def respond(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The first case that the program of the last turn fails; None when there is none."""
        report = self._judge.explain(messages[-1]["content"], self._gold, SHARE_OF_TURN * self.turn_timeout_s)
        self._passes = report["extracted"] is not None and report["failed case"] is None
        if self._passes:
            return None
        if report["extracted"] is None:
            return [{"role": "user", "content": "No program was found. Write the whole program in a fenced block."}]
        details = "\n".join(
            f"{label}: {report[label].strip()}"
            for label in ("ending", "expected", "printed", "standard error")
            if report[label]
        )
        text = f"The program fails case {report['failed case']}.\n{details}\nWrite the whole program again, corrected."
        return [{"role": "user", "content": text}]

    def get_reward(self) -> float:
        """1 if the last program passed."""
        return float(self._passes)


class NumberGame(Responder):
    """A hidden whole number that the players, taking turns, guess: "+" says that it is higher, "-" that it is lower.

    The conversation ends with the right guess, or with a turn that is no number. The reward is shared: 1 for a right
    first guess, 1/2 for the second, 1/n for the n-th, 0 without one.
    """

    def reset(self, *, gold: str, **row: Any) -> None:
        """Hides the number of a data row."""
        self._hidden, self._num_guesses, self._is_found = int(gold), 0, False

    def respond(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The direction of the hidden number from the last guess."""
        self._num_guesses += 1
        try:
            guess = int(messages[-1]["content"])
        except ValueError:
            return None
        self._is_found = guess == self._hidden
        return None if self._is_found else [{"role": "user", "content": "+" if guess < self._hidden else "-"}]

    def get_reward(self) -> float:
        """The players' reward."""
        return 1.0 / self._num_guesses if self._is_found else 0.0
