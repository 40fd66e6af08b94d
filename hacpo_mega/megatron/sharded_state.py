"""What an actor leaves on disk and takes up again: its shards of weights, main weights and moments, by Megatron.

Every rank writes what it owns, once (Megatron's dist_checkpointing); nothing is gathered. Weights are stored by their
place in the whole model, Adam's state by its place in the data-parallel buffers ("dp_reshardable"): it can be read back
on any number of cells, but only under the tp and pp that wrote it. Gradients are not stored, since a step begins
without; neither is the learning rate, a function of the number of updates, nor the reference policy, which is the model
folder.
Not here: which steps are kept, and that a step exists for all agents or for none (checkpoint.py).
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from hacpo_mega.megatron.model import unwrapped
from hacpo_mega.megatron.optimizer import ActorOptimizer
from hacpo_mega.megatron.platform import megatron_platform


class NotWritten(OSError):
    """The disk has refused a shard, and all ranks of the agent know: each has this error, none waits for another."""


@torch.no_grad()
def save_state(model: DistributedDataParallel, optimizer: ActorOptimizer, folder: Path) -> None:
    """Writes the actor into an empty folder that every rank sees, synced to disk. Collective over the agent.

    NotWritten when a rank cannot write its shard; the actor is as it was.
    """
    with megatron_platform():
        dist_checkpointing.save(_state(model, optimizer), str(folder), sharded_strategy=_SaveInProcess("torch_dist", 1))


@torch.no_grad()
def load_state(
    model: DistributedDataParallel, optimizer: ActorOptimizer, folder: Path, *, num_updates: int, num_applied: int
) -> None:
    """Makes the actor what it was when `folder` was written, to the last bit. Collective over the agent.

    num_updates   updates of the run so far, where the learning rate stands
    num_applied   those of them that were applied: Adam's step
    """
    with megatron_platform():
        state = dist_checkpointing.load(_state(model, optimizer), str(folder))
        unwrapped(model).load_state_dict(state["model"])
        optimizer.part.load_parameter_state_from_dp_reshardable(state["optimizer"])
    optimizer.set_progress(num_updates, num_applied)


def _state(model: DistributedDataParallel, optimizer: ActorOptimizer) -> dict[str, Any]:
    """What this rank owns, with its place in the whole."""
    optimizer.make_moments()
    # A plain state_dict would hold detached copies: Megatron finds a parameter's shard by the parameter itself.
    of_model = unwrapped(model).sharded_state_dict()
    of_optimizer = optimizer.part.sharded_param_state_dp_reshardable(of_model)
    _zero_padding(of_optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _zero_padding(of_optimizer: dict[Any, Any]) -> None:
    """What lies between parameters in a buffer would be written as the memory happened to be: nobody's bytes, NaN."""
    buckets = (bucket for key, dtypes in of_optimizer.items() if isinstance(key, int) for bucket in _buckets(dtypes))
    for tensors in (tensors for bucket in buckets for tensors in bucket):
        if tensors["padding"].unwrap():
            for shard in tensors.values():
                if isinstance(shard, ShardedTensor):
                    shard.data.zero_()


def _buckets(dtypes: dict[Any, list]) -> list:
    return [bucket for buckets in dtypes.values() for bucket in buckets]


class _SaveInProcess(SaveShardedStrategy):
    """Megatron's format, written by the process itself.

    Its own writer forks a process that holds an engine, threads and sockets, and starts a second one that imports
    everything again: made to write while training goes on, which we do not yet.
    """

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        try:
            checkpoint.save(
                mcore_to_pyt_state_dict(state, is_loading=False),
                storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )
        except CheckpointException as failed:  # which torch has told all ranks of the agent
            rank, (error, _) = min(failed.failures.items())
            raise NotWritten(f"its rank {rank} could not write: {error}") from failed
