"""Parallel groups of one agent, and Megatron's start in a process. Not here: which rank does what (place.py)."""

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hacpo_mega.cluster.patches import apply_patches
from hacpo_mega.megatron.patches import MEGATRON
from hacpo_mega.megatron.platform import megatron_platform

# A cell's ranks are neighbours: rank = cell * (tp * cp * pp) + (pp_rank * cp + cp_rank) * tp + tp_rank.
RANK_ORDER = "tp-cp-ep-pp-dp"


def initialize_parallel(
    tp: int, pp: int, seed: int, timeout_s: float = 1800.0, *, cp: int = 1, ep: int | None = None
) -> None:
    """Creates Megatron's groups over the current default process group (one agent's world), and its random streams.

    Rank order is RANK_ORDER; data parallelism takes the rest of the world. `ep` ranks share a layer's experts, those of
    one cell or of several neighbouring ones; None means no experts. `timeout_s` bounds every collective of these
    groups. Raises ValueError if tp * cp * pp does not divide the world. Gloo twins of the groups are not made:
    optimizers take `use_gloo_process_groups=False`.
    """
    world_size = dist.get_world_size()
    if world_size % (cell := tp * cp * pp):
        raise ValueError(f"tp * cp * pp = {tp} * {cp} * {pp} = {cell} does not divide the agent's {world_size} ranks")
    apply_patches(MEGATRON)
    with megatron_platform():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            # Megatron lays out experts, too: as wide, their pipelines have the ranks of these. See `_share_experts`.
            expert_model_parallel_size=cp,
            order=RANK_ORDER,
            distributed_timeout_minutes=timeout_s / 60.0,  # a timedelta is made of it, which takes parts of minutes
            create_gloo_process_groups=False,
        )
        if ep is not None:
            _share_experts(tp * cp, pp, ep, timedelta(seconds=timeout_s))
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _share_experts(ranks: int, pp: int, ep: int, timeout: timedelta) -> None:
    """Replaces Megatron's expert groups by groups in which `ep` ranks of a stage share experts.

    Megatron's order of ranks spreads experts over exactly all ranks of a stage of a cell. Here every `ep` neighbours
    share them, among the ranks that the stage has in all cells, `ranks` in each. Ranks with the same experts, in this
    cell and in others, sum their gradients and share their optimizer.
    """
    names, cells = parallel_state, range(0, dist.get_world_size(), ranks * pp)
    for stage in range(pp):
        line = [cell + stage * ranks + place for cell in cells for place in range(ranks)]
        for share in (line[first : first + ep] for first in range(0, len(line), ep)):
            group = names.create_group(share, timeout=timeout, group_desc="EXPERT_MODEL_PARALLEL_GROUP")
            if dist.get_rank() in share:
                names._EXPERT_MODEL_PARALLEL_GROUP, names._EXPERT_MODEL_PARALLEL_RANKS = group, share
                names._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = group
        for same in (line[place::ep] for place in range(ep)):
            group = names.create_group(same, timeout=timeout, group_desc="EXPERT_DATA_PARALLEL_GROUP")
            if dist.get_rank() in same:
                names._EXPERT_DATA_PARALLEL_GROUP = names._INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = group
