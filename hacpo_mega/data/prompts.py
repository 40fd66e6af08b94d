"""Prompts of a step: a pure function of (seed, step), the same in every process and after every resume.

Epochs are seeded permutations laid end to end; a step takes the next `prompts_per_step` places and may straddle two
epochs. It never holds a row twice: where a step would take a row of the old epoch again from the new one, the new epoch
postpones that row to the next step. There is no cursor to save: the prompts of a resumed run follow from its step.
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
        self.rows_by_skill = [[row for row in rows if skill is None or row.skill == skill] for skill in skills]
        self.seed = seed
        self.prompts_per_step = prompts_per_step
        self.prompts_per_update = prompts_per_update
        self._share = prompts_per_step // len(skills)  # places of a skill in a step
        assert prompts_per_step % len(skills) == 0, (prompts_per_step, skills)
        smallest = min(self.rows_by_skill, key=len)
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
        return tuple(sorted({row.skill for rows in self.rows_by_skill for row in rows}))

    def at(self, step: int, lane: int = 0, num_lanes: int = 1) -> tuple[Prompt, ...]:
        """The prompts of `lane` in `step`; `Prompt.index` is the place in the whole step."""
        assert self.prompts_per_update % num_lanes == 0, (self.prompts_per_update, num_lanes)
        assert 0 <= lane < num_lanes, (lane, num_lanes)
        share = self.prompts_per_update // num_lanes
        starts = range(lane * share, self.prompts_per_step, self.prompts_per_update)
        return tuple(self._prompt(step, place) for start in starts for place in range(start, start + share))

    def _prompt(self, step: int, place: int) -> Prompt:
        skill = place % len(self.rows_by_skill)
        rows = self.rows_by_skill[skill]
        position = step * self._share + place // len(self.rows_by_skill)
        epoch, offset = divmod(position, len(rows))
        row = rows[self._order_of(skill, epoch)[offset]]
        return Prompt(place, row.id, row.text, row.gold, row.skill, row.row)

    def _order_of(self, skill: int, epoch: int) -> np.ndarray:
        """The rows of an epoch in the order in which steps take them."""
        if (skill, epoch) not in self._order:
            earlier = [known for of, known in self._order if of == skill and known < epoch]
            # The order of a short epoch depends on the one before: such epochs are made one after the other.
            first = epoch if self._is_long(skill) else max(earlier, default=-1) + 1
            for missing in range(first, epoch + 1):
                self._order[skill, missing] = self._order_without_repeats(skill, missing)
                self._order.pop((skill, missing - 2), None)
        return self._order[skill, epoch]

    def _order_without_repeats(self, skill: int, epoch: int) -> np.ndarray:
        """The permutation of an epoch, where a step that began in the epoch before takes the first rows new to it.

        The displaced rows come right after them, so the order changes over at most the length of a step.
        """
        order = self._permutation(skill, epoch)
        num_before = epoch * len(order) % self._share  # places of that step in the epoch before
        if not num_before:
            return order
        before = self._permutation(skill, epoch - 1) if self._is_long(skill) else self._order[skill, epoch - 1]
        is_new = ~np.isin(order, before[-num_before:])
        is_next = is_new & (np.cumsum(is_new) <= self._share - num_before)
        return np.concatenate([order[is_next], order[~is_next]])

    def _is_long(self, skill: int) -> bool:
        """True if the change at the beginning of an epoch cannot reach its end, so that no earlier epoch matters."""
        return len(self.rows_by_skill[skill]) >= 2 * self._share

    def _permutation(self, skill: int, epoch: int) -> np.ndarray:
        # raw words and a stable sort: numpy guarantees the raw stream of a bit generator, not its permutation(),
        # and a resumed run may meet another numpy
        bits = np.random.PCG64(np.random.SeedSequence((self.seed, STREAM, skill, epoch)))
        return np.argsort(bits.random_raw(len(self.rows_by_skill[skill])), kind="stable")
