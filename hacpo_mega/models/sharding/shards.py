"""Rectangles of Hugging Face tensors, and the matrices of neighbouring experts as one rectangle of three dimensions.

A folder has a tensor for each matrix of each expert, 18,432 of them in Qwen3-30B-A3B; an actor and an engine hold those
of all their experts at equal distances in one memory. Published one by one they would be a hundred times as many
pieces as there are copies to make, so all experts' matrices of a kind and layer count as one tensor [experts, rows,
columns], whose name has a star for the number of the expert. Imports no torch.
"""

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
STAR = "*"


@dataclass(frozen=True)
class Shard:
    """A rectangle of the tensor `name` that a rank holds."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def overlap(self, other: "Shard") -> "Shard | None":
        """The part of the same tensor that both hold."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes))
        sizes = tuple(end - start for start, end in zip(starts, ends))
        return None if min(sizes) <= 0 else Shard(self.name, starts, sizes)

    def part(self, dim: int, start: int, size: int) -> "Shard":
        """`size` rows of a dimension, from row `start` of this shard on."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, size
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes))

    @property
    def num_members(self) -> int:
        """Number of experts' tensors of which the shard has a rectangle; 1 for a tensor of no expert."""
        return self.sizes[0] if STAR in self.name else 1

    def member(self, number: int) -> "Shard":
        """The rectangle of one of these tensors."""
        if STAR not in self.name:
            return self
        return Shard(self.name.replace(STAR, str(self.offsets[0] + number)), self.offsets[1:], self.sizes[1:])

    def __str__(self) -> str:
        ranges = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{', '.join(ranges)}]"


def stack_name(name: str) -> str:
    """The name under which a folder's tensor counts: its own, or that of its stack for an expert's."""
    return EXPERT.sub(STAR, name)


def stacked_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Tensors of a folder, name -> shape, with those of experts stacked into one."""
    stacks: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        stack = stack_name(name)
        stacks[stack] = shape if stack == name else (stacks.get(stack, (0,))[0] + 1, *shape)
    return stacks


def stacked(shards: Sequence[Shard]) -> Shard:
    """The single shard that these shards of neighbouring experts form; one of no expert stays itself."""
    first = shards[0]
    expert = _expert(first)
    if expert is None:
        (only,) = shards
        return only
    return Shard(stack_name(first.name), (expert, *first.offsets), (len(shards), *first.sizes))


def runs(held: Iterable[tuple[Shard, Hashable, int]]) -> list[list[int]]:
    """Runs of shards, by number, that count as one: equal rectangles of neighbouring experts at equal distances.

    held   of every shard: itself, the memory that it lies in, and its offset there
    """
    all_runs: list[list[int]] = []
    # kind of matrix -> its last run, the last expert in it, the offset of that, and the distance to the one before
    latest: dict[Hashable, tuple[list[int], int, int, int | None]] = {}
    for number, (shard, memory, offset) in enumerate(held):
        expert = _expert(shard)
        kind = (stack_name(shard.name), shard.offsets, shard.sizes, memory)
        run, last, before, step = latest.get(kind, ([], -1, 0, None))
        distance = offset - before
        if not run or expert is None or expert != last + 1 or distance <= 0 or step not in (None, distance):
            run, distance = [], None
            all_runs.append(run)
        run.append(number)
        if expert is not None:
            latest[kind] = run, expert, offset, distance
    return all_runs


def _expert(shard: Shard) -> int | None:
    number = EXPERT.search(shard.name)
    return None if number is None else int(number[0])
