"""Prompts of a step: a pure function of (seed, step), the same in every process and after every resume.

Epochs are seeded permutations laid end to end; a step takes the next `prompts_per_step` places and may straddle two
epochs. It never holds a row twice: where the seam of two epochs would bring one again, the new epoch postpones it to
the next step. There is no cursor to save: a resumed run asks for its next step and gets what it would have got.
Elsewhere: reading files (files.py) and making arithmetic (tasks.py).
"""

import math
from collections.abc import Sequence

import numpy as np

from hacpo_mega.data.reading.files import PromptRow
from hacpo_mega.data.tasks import Example
from hacpo_mega.records import Prompt

# Apart from the streams 0 and 1 of a warm start (tasks.py): with the seed of `init` a run would begin with the very
# examples that its models were taught.
STREAM = 2


def rows_of_examples(examples: Sequence[Example]) -> tuple[PromptRow, ...]:
    """Arithmetic examples as prompt rows; the gold answer is the result alone, since the working is not judged."""
    return tuple(PromptRow(e.id, e.prompt, e.result, e.skill) for e in examples)


def to_prompts(rows: Sequence[PromptRow]) -> tuple[Prompt, ...]:
    """Rows as the prompts of an evaluation, numbered in order."""
    return tuple(Prompt(i, row.id, row.text, row.gold, row.skill, row.row) for i, row in enumerate(rows))


class PromptSampler:
    """Prompts of a step and of a lane.

    With `balance_skills` every skill gives the same number of prompts to a step, from its own permutation, and place i
    of a step belongs to skill i % num_skills: blocks of a step are then balanced too. The places of a step are its
    updates end to end, and every update is dealt to the lanes in blocks: lane d of D gets the d-th of D parts of each.
    So neither `lane` nor the number of lanes changes which prompts a step has, or which of them share an update.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        seed: int,
        prompts_per_step: int,
        prompts_per_update: int,
        balance_skills: bool = False,
    ) -> None:
        """ValueError when a step needs more prompts than there are."""
        assert prompts_per_step % prompts_per_update == 0, (prompts_per_step, prompts_per_update)
        skills = sorted({row.skill for row in rows}) if balance_skills else [None]
        self.groups = [[row for row in rows if skill is None or row.skill == skill] for skill in skills]
        self.seed = seed
        self.prompts_per_step = prompts_per_step
        self.prompts_per_update = prompts_per_update
        self._share = prompts_per_step // len(skills)  # places of a group in a step
        assert prompts_per_step % len(skills) == 0, (prompts_per_step, skills)
        smallest = min(self.groups, key=len)
        most, unit = len(smallest) * len(skills), math.lcm(prompts_per_update, len(skills))
        if most < prompts_per_step:
            raise ValueError(
                f"training.prompts_per_step ({prompts_per_step}) takes {self._share} different "
                f"prompts{f' of each of {len(skills)} skills' if len(skills) > 1 else ''}, but there are only "
                f"{len(smallest)}{f' of {smallest[0].skill!r}' if len(skills) > 1 else ''}. "
                f"Nearest: {most // unit * unit or most}"
            )
        self._order: dict[tuple[int, int], np.ndarray] = {}

    @property
    def skills(self) -> tuple[str, ...]:
        """Names of the skills of all rows, in alphabetical order; "" is that of rows without one."""
        return tuple(sorted({row.skill for group in self.groups for row in group}))

    def at(self, step: int, lane: int = 0, num_lanes: int = 1) -> tuple[Prompt, ...]:
        """The prompts of `lane` in `step`; `Prompt.index` is the place in the whole step."""
        assert self.prompts_per_update % num_lanes == 0, (self.prompts_per_update, num_lanes)
        assert 0 <= lane < num_lanes, (lane, num_lanes)
        share = self.prompts_per_update // num_lanes
        starts = range(lane * share, self.prompts_per_step, self.prompts_per_update)
        return tuple(self._prompt(step, place) for start in starts for place in range(start, start + share))

    def _prompt(self, step: int, place: int) -> Prompt:
        group = place % len(self.groups)
        rows = self.groups[group]
        position = step * self._share + place // len(self.groups)
        epoch, offset = divmod(position, len(rows))
        row = rows[self._order_of(group, epoch)[offset]]
        return Prompt(place, row.id, row.text, row.gold, row.skill, row.row)

    def _order_of(self, group: int, epoch: int) -> np.ndarray:
        """The rows of an epoch in the order in which steps take them."""
        if (group, epoch) not in self._order:
            kept = [known for of, known in self._order if of == group and known < epoch]
            for this in range(epoch if self._is_long(group) else max(kept, default=-1) + 1, epoch + 1):
                self._order[group, this] = self._without_a_row_twice(group, this)
                self._order.pop((group, this - 2), None)
        return self._order[group, epoch]

    def _without_a_row_twice(self, group: int, epoch: int) -> np.ndarray:
        """The permutation of an epoch, where the step of its seam takes the first rows that it does not hold yet.

        The displaced rows come right after them, so the order changes over at most the length of a step.
        """
        order = self._permutation(group, epoch)
        num_before = epoch * len(order) % self._share  # places of that step in the epoch before
        if not num_before:
            return order
        before = self._permutation(group, epoch - 1) if self._is_long(group) else self._order[group, epoch - 1]
        is_new = ~np.isin(order, before[-num_before:])
        is_next = is_new & (np.cumsum(is_new) <= self._share - num_before)
        return np.concatenate([order[is_next], order[~is_next]])

    def _is_long(self, group: int) -> bool:
        """True if the change at the beginning of an epoch cannot reach its end, so that no earlier epoch matters."""
        return len(self.groups[group]) >= 2 * self._share

    def _permutation(self, group: int, epoch: int) -> np.ndarray:
        # raw words and a stable sort: numpy guarantees the raw stream of a bit generator, not its permutation(),
        # and a resumed run may meet another numpy
        bits = np.random.PCG64(np.random.SeedSequence((self.seed, STREAM, group, epoch)))
        return np.argsort(bits.random_raw(len(self.groups[group])), kind="stable")
