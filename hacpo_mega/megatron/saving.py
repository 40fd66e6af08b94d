"""A state on its way to disk: what is written is fixed first, and may then be written while training goes on.

Megatron's own asynchronous writers are not used here. One forks the trainer: the child holds the ring's sockets, so
that a killed trainer would not be missed (cluster/watchdog.py), goes on writing into a folder that the next start
removes, and was forked beside the threads of vLLM, gloo and OpenMP and a CUDA context. The other one starts an
interpreter per rank that imports everything again, and hands it every tensor through shared memory. So the state is
copied to host memory and a thread of the trainer writes the copy, by the same writer of torch. It has a process group
of its own: its collectives must not meet those of training.
Not here: when a save begins, and that it counts only when all agents' are done (joint_checkpoint.py).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter


@dataclass(frozen=True)
class Saving:
    """The second half of a save: `write`, then `finish`.

    write    in any thread, once; all ranks of the agent do, and each returns when its share is written and synced
    finish   in the main thread, when this rank has written; collective over the agent
    """

    write: Callable[[], None]
    finish: Callable[[], None]

    @classmethod
    def of(cls, request: AsyncRequest) -> "Saving":
        """Megatron's request, to be carried out by whoever holds it."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        return cls(partial(_write, request, device), partial(_finish, request))


def _write(request: AsyncRequest, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # a thread begins on device 0, which is another rank's
    request.async_fn(*request.async_fn_args)


def _finish(request: AsyncRequest) -> None:
    for function in request.finalize_fns:
        function()


class SaveLater(AsyncSaveShardedStrategy):
    """Megatron's format, written by the process itself.

    group    of gloo, over all ranks of the agent, in which nobody else speaks
    copies   whether the state is copied to host memory, so that it may change while it is being written
    """

    def __init__(self, group: dist.ProcessGroup, *, copies: bool) -> None:
        super().__init__("torch_dist", 1)
        self._group, self._copies = group, copies

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> AsyncRequest:
        """What `Saving` carries out. Touches the state only before it returns, if it copies."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        if self._copies:
            state = {key: [_on_host(shard) for shard in shards] for key, shards in state.items()}
        return AsyncRequest(_save, (mcore_to_pyt_state_dict(state, is_loading=False), checkpoint_dir, self._group), [])


def _on_host(shard: Any) -> Any:
    if not isinstance(shard, ShardedTensor):
        return shard
    return dataclasses.replace(shard, data=shard.data.detach().to("cpu", copy=True))


def _save(state: dict[str, Any], folder: str, group: dist.ProcessGroup) -> None:
    checkpoint.save(
        state,
        storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        process_group=group,
    )
