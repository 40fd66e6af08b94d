"""Expert load balance of an update, over all layers and all ranks of an agent, and the routers' auxiliary losses.

Not here: counting (router.py), the metrics (logbook/files/metrics.py).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hacpo_mega.megatron.model.model import HiddenStateModel
from hacpo_mega.megatron.model.router import coefficients
from hacpo_mega.records import ExpertLoad, MicroBatch


class ExpertCounts:
    """Reads the counters of the routers in this rank's part of a model; there are none without experts."""

    def __init__(self, model: HiddenStateModel) -> None:
        layers = [layer for chunk in model.own_chunks for layer in chunk.decoder.layers]
        self._architecture = model.architecture
        # Megatron counts the layers of the whole model, from 1 on.
        numbers = {layer.layer_number - 1: layer.mlp for layer in layers}
        self._routers = {n: mlp.router for n, mlp in numbers.items() if model.architecture.has_experts_in(n)}
        self._coefficients, self._num_tokens = coefficients(model.config), 0
        self._has_losses = model.architecture.has_experts and any(self._coefficients)

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Resets the counters; until `load` the routers also learn from their auxiliary losses.

        `batches` are this cell's. Collective over the agent if there are such losses.
        """
        if self._has_losses:
            total = torch.tensor(sum(batch.num_tokens for batch in batches), device=torch.cuda.current_device())
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            self._num_tokens = int(total)
        for router in self._routers.values():
            router.load_E.zero_()
            router.replayed_2.zero_()
            router.losses_2.zero_()
            router.num_tokens = self._num_tokens

    def load(self) -> ExpertLoad | None:
        """Load since `begin`; None if no token had experts. Collective over the agent, if it has experts."""
        a = self._architecture
        if not a.has_experts:
            return None
        counts_LN = torch.zeros(
            a.expert_layers, a.num_experts + 2, dtype=torch.int64, device=torch.cuda.current_device()
        )
        # Ranks of tp and cp have other tokens, those of pp other layers.
        for layer, router in self._routers.items():
            counts_LN[layer - a.dense_layers] = torch.cat([router.load_E, router.replayed_2])
        dist.all_reduce(counts_LN)
        found = expert_load(counts_LN[:, :-2], counts_LN[:, -2:])
        for router in self._routers.values():
            router.num_tokens = 0
        return found if found is None or not self._has_losses else replace(found, **self._losses())

    def _losses(self) -> dict[str, float]:
        """Means over tokens and layers of the enabled losses. Collective over the agent."""
        sums_2 = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        for router in self._routers.values():
            sums_2 += router.losses_2
        dist.all_reduce(sums_2)
        means = (sums_2 / (self._num_tokens * self._architecture.expert_layers)).tolist()
        names = ("aux_loss", "z_loss")
        return {name: mean for name, mean, wanted in zip(names, means, self._coefficients) if wanted}


def expert_load(counts_LE: torch.Tensor, replayed_L2: torch.Tensor | None = None) -> ExpertLoad | None:
    """Load from the number of rows per layer and expert, int64 [L, E]; None if a layer has none.

    `replayed_L2` [L, 2] has the replayed pairs that the router had not chosen, and all replayed pairs.
    """
    total_L1 = counts_LE.sum(dim=1, keepdim=True)
    if not total_L1.all():
        return None
    shares_LE = counts_LE.double() / total_L1
    entropy_L = torch.special.entr(shares_LE).sum(dim=1) / math.log(max(2, counts_LE.shape[1]))
    changed, replayed = (0, 0) if replayed_L2 is None else replayed_L2.sum(dim=0).tolist()
    share = changed / replayed if replayed else None
    return ExpertLoad(shares_LE.amax(dim=1).mean().item(), entropy_L.mean().item(), share)
