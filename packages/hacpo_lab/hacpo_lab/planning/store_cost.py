"""The cost of a job to its store and its sockets, as formulas over the rank map; test_store_traffic.py counts the same.

    key      one set: the address of a rank in a gloo group, or in the watchdog's ring; and a mark of its arrival
    get      one read of such a key: the neighbour's in the ring, and every gloo peer's, at the first message to it
    socket   one to the store, two in the ring, one to every gloo peer

gloo's algorithms decide who is a peer: a gather speaks to its root alone, a broadcast along a binomial tree, an
all-gather to both neighbours of a ring. Not covered: NCCL, which needs one key per communicator and one get per member.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hacpo_mega.cluster.groups.tree_levels import FANOUT, Level, tree_levels
from hacpo_mega.cluster.rank_map import RankMap

# Bytes of a key of a gloo group and of the ring, as counted in real jobs (docs/design/scaling.md).
GROUP_KEY_BYTES, RING_KEY_BYTES = 154, 50


class Group(NamedTuple):
    """A gloo group as one rank sees it; `use` is what it carries: tree, broadcast, ring, or nothing."""

    name: str
    rank: int
    size: int
    use: str


def groups_of(rank_map: RankMap, rank: int, fanout: int = FANOUT) -> list[Group]:
    """The groups that Place makes on a rank."""
    my = rank_map.coordinate(rank)
    shape = rank_map.agents[my.agent]
    groups = [Group(f"agent/{my.agent}", my.agent_rank, rank_map.agent_world_size(my.agent), "nothing")]
    if my.is_leader:
        leaders = rank_map.leaders(my.lane)
        groups.append(Group(f"lane/{my.lane}", leaders.index(rank), len(leaders), "ring"))
        groups += _tree(f"row/{my.agent}", tree_levels(my.cell, rank_map.lanes * shape.cells_per_lane, fanout))
    groups.append(Group(f"cell/{my.agent}/{my.cell}", my.cell_rank, shape.cell_size, "broadcast"))
    if shape.block_cells > 1:
        groups.append(Group(f"block/{my.agent}/{my.block}", my.block_rank, shape.block_size, "ring"))
    return [*groups, *_tree("job", tree_levels(rank, rank_map.world_size, fanout))]


def _tree(name: str, levels: list[Level]) -> list[Group]:
    return [Group(f"{name}/{level.name}", level.rank, level.size, "tree") for level in levels]


def peers(group: Group) -> set[int]:
    """The ranks of a group that a rank of it connects to."""
    along_broadcast = set()
    for bit in range((group.size - 1).bit_length()):
        other = group.rank ^ (1 << bit)
        if max(group.rank, other) < min(2 << bit, group.size):
            along_broadcast.add(other)
    if group.use == "broadcast":
        return along_broadcast
    if group.use == "ring":
        return {(group.rank + step) % group.size for step in (-1, 1)} - {group.rank}
    if group.use == "tree":
        return set(range(1, group.size)) if group.rank == 0 else along_broadcast | {0}
    return set()


@dataclass(frozen=True)
class Cost:
    """The cost of one rank: keys that it sets, gets, sockets, and the messages that a gather over the job brings it."""

    keys: int
    gets: int
    sockets: int
    messages: int


def cost(rank_map: RankMap, rank: int, fanout: int = FANOUT) -> Cost:
    """The cost of a rank, from joining to the end of a first step, as far as Place makes it."""
    groups = groups_of(rank_map, rank, fanout)
    in_ring = rank_map.world_size > 1
    num_peers = sum(len(peers(group)) for group in groups)
    heads = sum(group.size - 1 for group in groups if group.name.startswith("job/") and group.rank == 0)
    return Cost(len(groups) + 1 + in_ring, num_peers + in_ring, 1 + 2 * in_ring + num_peers, heads)


def job_cost(rank_map: RankMap) -> tuple[int, int, int]:
    """(keys, reads, bytes of both) of all ranks together, all of them before the end of the first step."""
    costs = [cost(rank_map, rank) for rank in range(rank_map.world_size)]
    keys, gets = sum(one.keys for one in costs), sum(one.gets for one in costs)
    in_ring = 2 * rank_map.world_size if rank_map.world_size > 1 else 0  # a key and a read each
    in_groups = keys - rank_map.world_size + gets - in_ring  # without the marks of arrival, a byte each
    return keys, gets, in_groups * GROUP_KEY_BYTES + in_ring * RING_KEY_BYTES + rank_map.world_size
