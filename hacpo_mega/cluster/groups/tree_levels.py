"""Groups of a tree (tree.py) as arithmetic on ranks; imports no torch."""

from typing import NamedTuple

FANOUT = 32


class Level(NamedTuple):
    """One process's part in one level: the group's name, its own rank in it (0: the head), and the group's size."""

    name: str
    rank: int
    size: int


def tree_levels(rank: int, size: int, fanout: int = FANOUT) -> list[Level]:
    """The levels that member `rank` of `size` takes part in, from the leaves up; rank 0 is the root.

    Blocks are of neighbours, so results that go up the levels stay in the order of the ranks. A block of one is left
    out.
    """
    levels: list[Level] = []
    stride, height, index = 1, 0, 0
    while stride < size and index == 0:
        block, index = divmod(rank // stride, fanout)
        num_members = min(fanout, -(-size // stride) - block * fanout)
        if num_members > 1:
            levels.append(Level(f"{height}/{block}", index, num_members))
        stride, height = stride * fanout, height + 1
    return levels
