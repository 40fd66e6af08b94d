"""A tree carries everyone's bytes to its root in the order of the ranks, and the root's to everyone, at any depth."""

from datetime import timedelta
from itertools import product

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from job import TIMEOUT_S, run_group

from hacpo_mega.cluster.groups.tree import Tree, join, split
from hacpo_mega.cluster.groups.tree_levels import tree_levels

FANOUTS = (2, 3, 8)
PAYLOADS = [b"", b"a", b"\0" * 100_003, b"bcd", b"", b"\0", b"ef\0", b"\xff" * 17]


def carry(num_ranks: int) -> list[list[bytes]]:
    """Gathers over the tree of every fan-out, after what it shares has been looked at."""
    rank, gathered = dist.get_rank(), []
    for fanout in FANOUTS:
        store = dist.PrefixStore(f"tree/{fanout}", dist.distributed_c10d._get_default_store())

        def make_group(level, store=store):
            prefix = dist.PrefixStore(level.name, store)
            return dist.ProcessGroupGloo(prefix, level.rank, level.size, timedelta(seconds=TIMEOUT_S))

        tree = Tree(rank, num_ranks, make_group, fanout)
        for payload in (b"", b"one for all", b"\0" * 70_001):
            assert tree.share(payload if rank == 0 else b"not looked at") == payload
        gathered.append(tree.gather(PAYLOADS[rank]))
        tree.wait_for_all()
        gathered.append(tree.gather(b"again %d" % rank))
    return gathered


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 5, 8])
def test_bytes_arrive_whole_and_in_order_at_every_depth(num_ranks):
    by_rank = run_group(num_ranks, carry, num_ranks)
    expected = [PAYLOADS[:num_ranks], [b"again %d" % rank for rank in range(num_ranks)]] * len(FANOUTS)
    assert by_rank == [expected] + [[[]] * 2 * len(FANOUTS)] * (num_ranks - 1)


@given(st.integers(1, 200), st.integers(2, 9))
def test_levels_hand_every_rank_to_the_root_in_order(size, fanout):
    """Played by hand: each level's members give what they have to its head."""
    held = {rank: [rank] for rank in range(size)}
    members: dict[str, dict[int, int]] = {}
    sizes = {}
    for rank in range(size):
        for level in tree_levels(rank, size, fanout):
            members.setdefault(level.name, {})[level.rank] = rank
            assert sizes.setdefault(level.name, level.size) == level.size <= fanout
    for name in sorted(members, key=lambda name: int(name.split("/")[0])):
        ranks = [members[name][index] for index in range(sizes[name])]  # exactly its size, counted from 0
        assert len(ranks) == len(members[name]) > 1
        for rank in ranks[1:]:
            held[ranks[0]] += held.pop(rank)
    assert held == {0: list(range(size))}


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_joined_payloads_split(payloads):
    assert split(join(payloads)) == payloads


def test_a_large_tree_is_shallow():
    counts = {(size, rank): tree_levels(rank, size) for size, rank in product((4096, 32_768), (0, 1, 32, 4095))}
    assert [len(counts[4096, rank]) for rank in (0, 1, 32, 4095)] == [3, 1, 2, 1]
    assert sum(level.size - 1 for level in counts[32_768, 0]) == 93
