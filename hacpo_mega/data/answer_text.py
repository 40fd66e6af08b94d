"""Where the answer is in a text, and what of it is only typesetting. Text only, no parser.

Not here: whether two answers are equal (grading/math_grader.py).
"""

import re

BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are signs, not groups
BARE = re.compile(r"[^\s$]+")
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
SAID = re.compile(r"\banswer(?: is:?|:)\s+(?=\S)", re.IGNORECASE)

# one pass over all commands, so that the second backslash of "\\" never starts one of its own; the space that only ends
# a command ("\times 10") goes with it
COMMAND = re.compile(r"\\(?:[a-zA-Z]+(?:\s+(?![a-zA-Z\s]))?|!\s*|[\s\S])")
NOTHING = frozenset(("\\!", "\\limits", "\\nolimits"))
SPACES = frozenset("\\" + name for name in (*",;:> \n$()[]", "quad", "qquad", "displaystyle", "textstyle"))
SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?")
FRACTIONS = ("\\dfrac", "\\tfrac", "\\cfrac")
TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit|textnormal)\s*\{([^{}]*)\}")
ONE_SIGN_POWER = re.compile(r"([\^_])\{(\w)\}")
# "1 2" is not 12 and "\sin x" no command, so a space between two letters or digits stays; "1, 234" is a list
LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
LIST_SPACE = re.compile(r"(?<=\d)\s*,\s+(?=\d{3}(?!\d))")
LIST_MARK = "\x00"


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


def tidy(answer: str) -> str:
    r"""An answer without typesetting: dollars, sizes, thin spaces, display fractions, a full stop, "the answer is".

    "\text{...}" stays, since a parser tells units by it. Linear in the text.
    """
    said = [found.end() for found in SAID.finditer(answer)]
    text = COMMAND.sub(_without_typesetting, answer[said[-1] if said else 0 :])
    text = SIZES.sub("", text).replace("{,}", ",").replace("$", " ")
    text = LIST_SPACE.sub("," + LIST_MARK, text.strip().rstrip(".").strip())
    return LOOSE_SPACE.sub("", text).replace(LIST_MARK, " ")


def _without_typesetting(command: re.Match[str]) -> str:
    sign = command[0] if command[0] in SPACES else command[0].rstrip()
    if sign in NOTHING:
        return ""
    if sign in SPACES:
        return " "
    return "\\frac" if sign in FRACTIONS else sign


def plain(answer: str) -> str:
    """What two spellings of one answer share: tidy, without text commands and braces round single signs."""
    return ONE_SIGN_POWER.sub(r"\1\2", TEXT_COMMAND.sub(lambda found: found[1] or " ", tidy(answer)))
