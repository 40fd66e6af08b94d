"""Whether nodes can pin what offload asks of them: said before a model is loaded, alike on every rank."""

import socket
from types import SimpleNamespace

from hacpo_mega.cluster import host_memory
from hacpo_mega.cluster.host_memory import require_host_memory

MIB = 1 << 20


def refusal(monkeypatch, *ranks: tuple[str, int, int], shares_devices: bool = False) -> str | None:
    """What a job is told whose ranks are (node, MiB that it pins, MiB that are free there), None where all is well.

    They speak one after another, and the last one, which has heard all, is listened to.
    """
    payloads, said = [], None
    rank_map = SimpleNamespace(shares_devices=shares_devices)
    place = SimpleNamespace(rank_map=rank_map, gather_job=lambda payload: payloads.append(payload) or payloads)
    for node, size, free in ranks:
        monkeypatch.setattr(socket, "gethostname", lambda node=node: node)
        monkeypatch.setattr(host_memory, "free_memory_bytes", lambda free=free: free * MIB)
        try:
            require_host_memory(place, size * MIB)
            said = None
        except ValueError as error:
            said = str(error)
    return said


def test_the_ranks_of_a_node_share_its_memory(monkeypatch):
    assert refusal(monkeypatch, ("a", 300, 1000), ("a", 700, 1010), ("b", 1000, 1000)) is None
    assert refusal(monkeypatch, ("a", 301, 1000), ("a", 700, 1010), ("b", 1000, 1000)) == (
        "agents.*.offload wants 1001 MiB of pinned memory on a, where 1000 MiB are free. Offload fewer agents "
        "(offload = 'none'), or spread them over more nodes"
    )


def test_agents_that_take_turns_wait_in_one_nodes_memory(monkeypatch):
    assert refusal(monkeypatch, ("a", 600, 1000), ("a", 600, 1000), shares_devices=True) == (
        "placement = 'shared' wants 1200 MiB of pinned memory on a, where 1000 MiB are free. Give agents devices of "
        "their own (placement = 'split')"
    )


def test_a_node_where_nothing_leaves_is_never_short(monkeypatch):
    assert refusal(monkeypatch, ("a", 0, 0), ("b", 5, 5)) is None
