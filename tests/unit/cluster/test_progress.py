"""A process says that it is stuck neither early, nor while it waits for others."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hacpo_mega.cluster.watchdog import Progress


def beats_until_stuck(progress: Progress, most: int = 40) -> tuple[int, str] | None:
    """(how many seconds, what is said) with a beat every second and a limit of ten; None when nothing is."""
    for number in range(1, most + 1):
        if said := progress.beat(1.0, 10.0):
            return number, said
    return None


@pytest.mark.parametrize("phase", ["load", "judge", "evaluate", "checkpoint", "export", "write", "doctor"])
def test_a_phase_that_tells_no_steps_may_last(phase):
    progress = Progress()
    progress.enter(phase)
    assert beats_until_stuck(progress) is None


def test_a_phase_that_tells_its_steps_is_stuck_without_them():
    progress = Progress()
    progress.enter("load")
    beats_until_stuck(progress, 9)
    progress.enter("learn")
    assert beats_until_stuck(progress, 9) is None
    progress.tick()
    assert beats_until_stuck(progress) == (10, "has made no progress for 10 s and is in no collective")


def test_who_waits_for_others_is_not_stuck_however_long_they_need():
    progress = Progress()
    progress.enter("exchange")
    with progress.waiting_for("all ranks"):
        assert progress.waits_for == "all ranks" and beats_until_stuck(progress) is None
    assert progress.waits_for is None
    assert beats_until_stuck(progress)[0] == 10


def test_who_waits_for_its_device_is_named_after_the_absent_rank():
    """A process on a GPU waits in .item(), not in torch.distributed, for a peer that never entered the collective."""
    progress, is_done = Progress(), False
    progress.queue = SimpleNamespace(query=lambda: is_done)
    progress.enter("learn")
    busy = (13, "has made no progress for 13 s and is in no collective, and its device has work")
    assert beats_until_stuck(progress) == busy
    is_done = True
    progress.tick()
    assert beats_until_stuck(progress)[0] == 10


def test_who_waits_for_a_device_that_failed_says_so():
    """The query of a GPU's queue raises from then on, in the thread that sends this process's signs of life."""
    progress = Progress()
    progress.queue = Mock()
    progress.queue.query.side_effect = torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with")
    progress.enter("learn")
    beats, said = beats_until_stuck(progress)
    assert beats == 13 and said.endswith("and its device has failed: CUDA error: unspecified launch failure")


def test_the_absent_rank_of_a_collective_is_named_first():
    """The beat comes from another thread, as in a job, while the main thread is in a file of torch.distributed."""
    progress, found = Progress(), []
    progress.enter("learn")
    thread = threading.Thread(target=lambda: found.append(beats_until_stuck(progress)))
    code = compile(
        "def all_reduce(thread):\n    thread.start()\n    thread.join()\n", "/x/torch/distributed/c10d.py", "exec"
    )
    names: dict = {}
    exec(code, names)
    names["all_reduce"](thread)
    ((beats, said),) = found
    assert beats == 13 and said.startswith("has made no progress for 13 s and is inside all_reduce (c10d.py, line ")
