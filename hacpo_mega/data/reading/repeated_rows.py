"""Rows that repeat an earlier row's prompt: counted and refused in one line a file, or left out (`data.repeated`).

Two rows of one prompt with different golds are refused in any case, and so is a prompt that is both trained on and
evaluated on. Not here: copies whose text differs (dataset_checks.py).
"""

from typing import NamedTuple


class FirstRow(NamedTuple):
    """First place of a prompt: FILE:LINE, the gold there, and the number of its set of files."""

    place: str
    gold: str
    number: int


class PromptsMet:
    """The first row of every prompt, over all files; each set of files (training, evaluation) is begun once."""

    def __init__(self) -> None:
        self._first: dict[str, FirstRow] = {}
        self._number = 0

    def begin_set(self) -> None:
        """Starts another set for the rows that come now."""
        self._number += 1

    def meet(self, prompt_id: str, place: str, gold: str) -> FirstRow | None:
        """The row in which this prompt was met before; None for its first one."""
        mine = FirstRow(place, gold, self._number)
        first = self._first.setdefault(prompt_id, mine)
        return None if first is mine else first

    def is_of_this_set(self, row: FirstRow) -> bool:
        """True if it is in the set that was begun last."""
        return row.number == self._number
