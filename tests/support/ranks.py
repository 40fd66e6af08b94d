"""Real processes with gloo for tests of what ranks do together."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on `num_ranks` fresh processes that form the default group; answers in rank order.

    The function must be importable and what it returns must survive torch.save. An exception in one rank is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, (num_ranks, Path(folder), function, arguments), nprocs=num_ranks)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _run(rank: int, num_ranks: int, folder: Path, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.save(function(*arguments), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
