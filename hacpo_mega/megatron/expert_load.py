"""How evenly the tokens of an update went to the experts of every layer, over all ranks of an agent.

Not here: who counts (router.py), and what the numbers mean in a run (logbook/metrics.py).
"""

import math
from itertools import chain

import torch
import torch.distributed as dist

from hacpo_mega.megatron.model import HiddenStateModel
from hacpo_mega.megatron.router import Router
from hacpo_mega.records import ExpertLoad


class ExpertCounts:
    """What the routers of this rank's part of a model count; a model without experts has none."""

    def __init__(self, model: HiddenStateModel) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        chunks, pp = model.chunks, model.pg_collection.pp
        of_chunks = [range(sum(chunks[:n]), sum(chunks[: n + 1])) for n in range(pp.rank(), len(chunks), pp.size())]
        self._layers, self._num_layers = [*chain(*of_chunks)], model.architecture.num_layers

    def begin(self) -> None:
        """Forgets what was counted before."""
        for router in self._routers:
            router.load_E.zero_()
            router.replayed_2.zero_()

    def load(self) -> ExpertLoad | None:
        """What was counted since; None where no token had experts. Collective over the agent, if it has experts."""
        if not self._routers:
            return None
        counts = torch.stack([torch.cat([router.load_E, router.replayed_2]) for router in self._routers])
        counts_LN = counts.new_zeros(self._num_layers, counts.shape[1])
        # Ranks of tp and cp have other tokens, those of pp other layers.
        counts_LN[self._layers] = counts
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
