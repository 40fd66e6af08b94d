"""A job of four ranks in which one, the victim, meets a fate while the others wait for it in several collectives."""

import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.logbook.run.rank_files import RankFile
from hacpo_mega.logbook.run.run_lock import RunLock

RANK_MAP = RankMap(1, (AgentShape("A", tp=2, engine_tp=2), AgentShape("B"), AgentShape("C")))


def run(victim: int, fate: str, timeout_s: float, ready: Path, stall_s: float = 600.0) -> None:
    """One rank. The victim, in phase "learn", creates the file `ready` when all others are in phase "exchange".

    With fate "late" it goes on when somebody has created the file `go` beside it. With fate "defer" all ranks heed only
    a second signal.
    """
    with Place.join(RANK_MAP, timeout_s, stall_s) as place, RankFile(ready.parent, place):
        place.watchdog.keep_stack_in(ready.parent / "logs")
        if fate == "defer":
            place.watchdog.defers_signals = True
            place.watchdog.exit_message = "started again, it goes on"
        rank = place.coordinate.global_rank
        if rank == 0:  # as trainer/build.py
            place.at_end(RunLock(ready.parent / "run").leave)
        place.enter_phase("roll_out", "of step 11")
        place.barrier()
        place.enter_phase("learn" if rank == victim else "exchange", "of step 12")
        place.barrier()  # whoever is slow to leave it is in its phase already
        if rank == victim:
            ready.touch()
            if fate == "raise":
                raise RuntimeError("loss is NaN\nsecond line")
            if fate == "exit":
                sys.exit(0)
            while fate in ("sleep", "defer") or not ready.with_name("go").exists():
                time.sleep(0.05)
                if fate == "late":
                    place.progress()
        if place.agent == 0:
            dist.all_reduce(torch.ones(1))
        if place.is_leader:
            place.gather_lane(b"answers")
        place.barrier()
    print("finished", flush=True)


def unheard(ready: Path) -> None:
    """One rank that waits to be told to end, of whose words nothing can be written and whose stack cannot be removed.

    Creates `ready`, and the file `ended` beside it as it ends.
    """
    with Place.join(RankMap(1, (AgentShape("A"),)), 60.0) as place:
        place.at_end(ready.with_name("ended").touch)
        place.watchdog.keep_stack_in(ready.parent)
        stack = ready.with_name("rank_0.stack")
        stack.unlink()
        stack.mkdir()
        with Path("/dev/full").open("w") as full, redirect_stdout(full), redirect_stderr(full):
            with suppress(OSError):
                print("what the buffer keeps", flush=True)
            ready.touch()
            time.sleep(600.0)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
