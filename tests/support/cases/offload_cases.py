"""An actor that goes to the host and comes back between steps, one whose optimizer's state does, and one that stays.

jobs/test_offload.py runs them on the CPU over gloo, gpu/test_offload_gpu.py has the parts that CUDA can repeat.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from actor_cases import full_weights, make_actor, objective, random_samples

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.train.optimizer import ActorOffload

ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.1, schedule="linear")


class Left(NamedTuple):
    """Measurements of an actor in its steps, and its state after them."""

    stats: list[tuple[float, ...]]
    weights: dict[str, torch.Tensor]
    state: list[torch.Tensor]


def play(folder: Path, out: Path, **options) -> tuple[Left, Actor]:
    """Two steps of two updates, each after a diagnosis; before the second step its state is written to `out`.

    out/away        while nobody needs it       out/returning   while it comes back
    options   offload_mode: what can, its gradient buffers, its state too, or everything
    """
    actor, stats = make_actor(folder, optimizer=ADAM, **options), []
    cell, cells = dist.get_rank() // actor.layout.tp, dist.get_world_size() // actor.layout.tp
    offload = actor.optimizer.offload
    whole = ActorOffload(actor.model, actor.optimizer) if options.get("offload_mode") == "everything" else None
    for step in range(2):
        if whole is not None:
            whole.offload()
        offload.begin_offload()
        offload.finish_offload()
        if step:
            write(actor, out / "away", copies=False)
        if whole is not None:
            whole.onload(to_learn=True)
        offload.begin_onload()
        if step:
            write(actor, out / "returning", copies=True)
        for number in range(2):
            samples = random_samples(8, seed=20 + 2 * step + number)
            mine = [sample for sample in samples if sample.prompt_index % cells == cell]
            found = actor.gradient_products([mine, mine[:1]], objective)
            done = actor.learn(mine, objective)
            stats.append((done.loss, done.grad_norm, done.lr, *found.squares, *found.products))
    return Left(stats, full_weights(actor), [tensor.clone() for tensor in kept(actor)]), actor


def kept(actor: Actor) -> list[torch.Tensor]:
    """The main weights and moments of this rank, by parameter; none are copies."""
    shares = map(actor.optimizer.share_of, actor.model.parameters())
    kinds = ("param", "exp_avg", "exp_avg_sq")
    return [share.state[kind] for share in shares if share is not None for kind in kinds]


def write(actor: Actor, folder: Path, *, copies: bool) -> None:
    """The actor's state as a checkpoint has it. Collective over the agent."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    actor.save(folder, copies=copies)[1]()


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory that is really there, whatever the tensors' shapes say."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
