"""Foreign text as a person sees it: whatever a terminal or a browser would obey instead of showing is written out.

Answers, gold, data files, names and other people's errors may hold terminal codes (the screen, its title, the
clipboard), carriage returns and backspaces that overwrite what stands there, and signs that turn the direction of
writing or have no width. All text of ours leaves by `say`, by a console that uses `one_line`, or by report/html.py.
Not covered: files for machines, which keep the text as it is.
"""

import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import TextIO

PLAIN = re.compile(r"[^\n\t -~]")
# Without width though they are letters and marks: fillers, joiners, selectors of a variant.
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def visible(text: str) -> str:
    r"""The text with every control, format, surrogate, private and unassigned character and line separator as \x1b.

    Line ends (\n) and tabs stay, and so does a backslash: answers are full of LaTeX.
    """
    return PLAIN.sub(_escaped, text)


def one_line(text: str) -> str:
    r"""As `visible`, with line ends as \n, so that one line of a log stays one, whatever it quotes."""
    return visible(text).replace("\n", "\\n")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines of text: every column as wide as its longest cell, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with their runs shortened: "3, 8-15"."""
    known = set(numbers)
    firsts = (number for number in numbers if number - 1 not in known)
    lasts = (number for number in numbers if number + 1 not in known)
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts))


def say(text: object, file: TextIO | None = None) -> None:
    """Prints `text` at once, with control characters escaped; to standard output unless a file is given."""
    print(visible(str(text)), file=sys.stdout if file is None else file, flush=True)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    category = unicodedata.category(character)
    is_hidden = category.startswith("C") or category in ("Zl", "Zp") or UNSEEN.match(character)
    return character.encode("unicode_escape").decode() if is_hidden else character
