"""The lane group on CUDA is NCCL, and bytes come through it whole."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hacpo_mega.cluster.groups.tree import gather_bytes
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.cluster.security.secret import Secret

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 4099])
def test_the_lane_of_one_agent_is_nccl_and_carries_bytes(payload, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30))
    device, secret = torch.device("cuda", 0), Secret(bytes(32))
    place = Place(RankMap(1, (AgentShape("a"),)), 0, device, store, timeout_s=60.0, stall_s=60.0, secret=secret)
    assert place.lane_group.name() == "nccl"
    assert gather_bytes(place.lane_group, payload) == [payload]
    assert place.gather_agent(payload) == [payload]
    place.close()
