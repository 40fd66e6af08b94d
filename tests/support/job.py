"""A job of real processes on this machine: each takes its `Place` and answers with what a function returns."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap

# Processes are forked from a server that has imported what is slow to import once, instead of once each.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["hacpo_mega.cluster.place", "hacpo_mega.megatron.platform"])


def free_port() -> int:
    """A port that nobody listens on; the job's rank 0 takes it a moment later."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_job(rank_map: RankMap, function: Callable[[Place, RankMap], Any], timeout_s: float = 120.0) -> list[Any]:
    """What `function(place, rank_map)` returns on every rank, by rank; its first error is raised here."""
    port, world_size = free_port(), rank_map.world_size
    with ProcessPoolExecutor(world_size, PROCESSES) as pool:
        ranks = [pool.submit(_run_rank, function, rank_map, rank, port, timeout_s) for rank in range(world_size)]
        return [rank.result(timeout=2 * timeout_s) for rank in ranks]


def _run_rank(function: Callable, rank_map: RankMap, rank: int, port: int, timeout_s: float) -> Any:
    torch.set_num_threads(1)
    os.environ.update(launcher_environment(rank, rank_map.world_size, port))
    place = Place.join(rank_map, timeout_s)
    # not `with place`: there an error ends the process, here it must reach the test
    result = function(place, rank_map)
    place.close()
    return result
