"""Groups of one rank are one group; those with peers are not."""

import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest
import torch.distributed as dist

from hacpo_mega.cluster.groups.lone_groups import Gloo

NUM_GROUPS = 12

PROGRAM = f"""
    import os
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from hacpo_mega.cluster.patches import TORCH, apply_patches

    def num_threads():
        return len(os.listdir("/proc/self/task"))

    apply_patches(TORCH)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = num_threads()
    groups = [dist.new_group([0], timeout=timedelta(seconds=7)) for _ in range({NUM_GROUPS})]
    for number, group in enumerate(groups):
        value = torch.full((3,), float(number))
        gathered = [torch.empty(3)]
        dist.all_gather(gathered, value, group=group, async_op=True).wait()
        dist.all_reduce(value, group=group)
        dist.barrier(group=group)
        assert value.tolist() == gathered[0].tolist() == [float(number)] * 3
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    print(num_threads() - before)
    dist.destroy_process_group(groups[3])
    dist.barrier(group=groups[4])
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
"""


@pytest.mark.nightly
def test_many_groups_of_one_rank_have_the_threads_of_one():
    """It would be three each, one of which wakes a hundred times a second."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) <= 3  # of one group that waits as long as these


def test_a_group_takes_what_newer_torch_asks_for():
    """torch 2.14 makes every gloo group with `enable_reconfigure`, which 2.13 does not know."""
    first, again = (
        Gloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=6), enable_reconfigure=False) for _ in range(2)
    )
    assert first is again
