"""Where the answer is in a text: the last box, what follows the reasoning, what follows "####". Text only, no parser.

Not here: whether two answers are equal (math_grader.py).
"""

import re

BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are signs, not groups
BARE = re.compile(r"[^\s$]+")
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def after_thinking(text: str) -> str:
    """What follows the last </think>, or the whole text."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed or \fbox that is complete: nested braces, or one token as in `\boxed 5`."""
    span = last_box(text)
    return None if span is None else text[span[1] : span[2]]


def last_box(text: str) -> tuple[int, int, int] | None:
    """Where the last complete box starts, and where its content starts and ends. One pass, linear in the text."""
    closing = _closing_braces(text)
    for box in reversed(list(BOX.finditer(text))):
        if text.startswith("{", box.end()):
            if box.end() in closing:
                return box.start(), box.end() + 1, closing[box.end()]
        elif bare := BARE.match(text, box.end()):
            return box.start(), bare.start(), bare.end()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    closing, opened = {}, []
    for sign in BRACE.finditer(text):
        if sign.group() == "{":
            opened.append(sign.start())
        elif sign.group() == "}" and opened:
            closing[opened.pop()] = sign.start()
    return closing


def gold_answer(gold: str) -> str:
    """The answer in a gold text: after the last "####" (GSM8K), else the text itself; a box in it is found later."""
    return gold.rpartition("####")[2].strip()
