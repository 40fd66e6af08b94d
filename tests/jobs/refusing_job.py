"""A job of four ranks of which some find that their user has to mend something."""

import json
import os
import time
from pathlib import Path

import torch

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.trainer.build import require_same_inputs

RANK_MAP = RankMap(1, (AgentShape("A", tp=2, engine_tp=2), AgentShape("B"), AgentShape("C")))


def run(phase: str, complaints: dict[int, str]) -> None:
    """One rank, which raises its complaint in `phase`; the others wait where nothing but their watchdog ends them."""
    with Place.join(RANK_MAP, 120.0) as place:
        if phase not in ("start", "inputs"):
            place.enter_phase(phase, "of step 1")
        place.barrier()
        if phase == "inputs":  # of a rank's node, as JSON
            require_same_inputs(place, *json.loads(complaints[place.coordinate.global_rank]))
        elif (complaint := complaints.get(place.coordinate.global_rank)) is not None:
            raise ValueError(complaint)
        time.sleep(1000.0)


def play(rank: int, told: dict[str, str], folder: Path, phase: str, complaints: dict[int, str]) -> None:
    """`run` as a rank whose launcher has set these variables; what it writes goes to the file RANK.err of `folder`."""
    for descriptor in (1, 2):
        os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(told)
    torch.set_num_threads(1)
    run(phase, complaints)
