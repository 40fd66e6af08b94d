"""How evenly the tokens of an update went to the experts of every layer, over all ranks of an agent.

Not here: who counts (router.py), and what the numbers mean in a run (logbook/metrics.py).
"""

import math

import torch
import torch.distributed as dist

from hacpo_mega.megatron.model import HiddenStateModel
from hacpo_mega.records import ExpertLoad


class ExpertCounts:
    """What the routers of this rank's part of a model count; a model without experts has none."""

    def __init__(self, model: HiddenStateModel) -> None:
        layers = [layer for chunk in model.own_chunks for layer in chunk.decoder.layers]
        self._architecture = model.architecture
        # Megatron counts the layers of the whole model, from 1 on.
        numbers = {layer.layer_number - 1: layer.mlp for layer in layers}
        self._routers = {n: mlp.router for n, mlp in numbers.items() if model.architecture.has_experts_in(n)}

    def begin(self) -> None:
        """Forgets what was counted before."""
        for router in self._routers.values():
            router.load_E.zero_()
            router.replayed_2.zero_()

    def load(self) -> ExpertLoad | None:
        """What was counted since; None where no token had experts. Collective over the agent, if it has experts."""
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
        return expert_load(counts_LN[:, :-2], counts_LN[:, -2:])


def expert_load(counts_LE: torch.Tensor, replayed_L2: torch.Tensor | None = None) -> ExpertLoad | None:
    """Of so many rows that every expert of every layer had, int64 [layers, experts]; None of none.

    `replayed_L2` says of those that were replayed how many were changed by it, and how many there are.
    """
    total_L1 = counts_LE.sum(dim=1, keepdim=True)
    if not total_L1.all():
        return None
    shares_LE = counts_LE.double() / total_L1
    entropy_L = torch.special.entr(shares_LE).sum(dim=1) / math.log(max(2, counts_LE.shape[1]))
    changed, replayed = (0, 0) if replayed_L2 is None else replayed_L2.sum(dim=0).tolist()
    share = changed / replayed if replayed else None
    return ExpertLoad(shares_LE.amax(dim=1).mean().item(), entropy_L.mean().item(), share)
