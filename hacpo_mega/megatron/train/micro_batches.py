"""Micro-batch helpers: equal counts over the replicas that share experts, progress, host-to-device copies, statistics.

Rows of tokens go to experts in other replicas and back, forward and backward, so all of these must be in the same layer
at the same time. A replica with fewer micro-batches than the fullest gets empty ones: some padding, whose rows travel
as others do, and nothing trained. Own answers and others' are filled up apart where they are packed apart: what an
expert computes together, rows of all replicas, is then the same when own answers are scored and when an update learns
from them, and so is every bit. Empty ones come first, so that a backward ends with a real one wherever it can
(overlap.py).
Not here: what is computed of micro-batches (actor.py), which sequences share one (samples/packing.py), who counts the
rows of an expert (router.py), and what these numbers mean in a run (logbook/files/metrics.py).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hacpo_mega.megatron.model.model import HiddenStateModel
from hacpo_mega.megatron.model.router import coefficients
from hacpo_mega.megatron.train.optimizer import OptimizerStep
from hacpo_mega.records import ExpertLoad, MicroBatch, Sample, TokenSequence, UpdateStats
from hacpo_mega.samples.packing import empty_microbatch


class EvenBatches(list):
    """Micro-batches with counts balanced across cells; iteration reports progress."""

    def __init__(self, batches: Sequence[MicroBatch], on_progress: Callable[[], None]) -> None:
        super().__init__(evened(batches))
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch in super().__iter__():
            self._on_progress()
            yield batch


def places(sequences: Sequence[TokenSequence], batch: MicroBatch) -> list[int]:
    """Index in `sequences` of each sequence of a micro-batch."""
    # by identity: comparing records would compare their token arrays
    place_of = {id(sequence): place for place, sequence in enumerate(sequences)}
    return [place_of[id(sequence)] for sequence in batch.sequences]


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Moves a micro-batch to the device for the loss function, which needs no routing; unchanged on the CPU."""
    if device.type == "cpu":
        return batch
    tensors = {
        field.name: getattr(batch, field.name).to(device, non_blocking=True)
        for field in dataclasses.fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor) and field.name != "routing_TLK"
    }
    return dataclasses.replace(batch, **tensors)


def update_stats(
    batches: Sequence[MicroBatch],
    loss: float,
    reports: Sequence[Any],
    step: OptimizerStep,
    experts: ExpertLoad | None,
) -> UpdateStats:
    """Statistics of an update from these micro-batches."""
    return UpdateStats(
        reports=tuple(reports),
        loss=loss,
        grad_norm=step.grad_norm,
        lr=step.lr,
        skipped=not step.applied,
        num_microbatches=len(batches),
        num_samples=sum(len(batch.sequences) for batch in batches),
        num_tokens=sum(batch.num_tokens for batch in batches),
        num_trained=sum(len(batch.rows_R) for batch in batches),
        experts=experts,
    )


def evened(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches, in their order, with empty ones among them; none where no other cell shares the experts.

    Else collective over the ranks that share experts.
    """
    ranks = parallel_state.get_tensor_and_context_parallel_world_size()
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() <= ranks:
        return list(batches)
    own = next((number for number, batch in enumerate(batches) if _is_of_others(batch)), len(batches))
    kinds = batches[:own], batches[own:]
    most = torch.tensor([len(kind) for kind in kinds], device=torch.cuda.current_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return [
        batch
        for kind, number in zip(kinds, most.tolist(), strict=True)
        for batch in [*[empty_microbatch(ranks)] * (number - len(kind)), *kind]
    ]


def _is_of_others(batch: MicroBatch) -> bool:
    """True if it holds other agents' answers; sequences that are no samples count as own, as in scoring."""
    first = batch.sequences[0]
    return isinstance(first, Sample) and not first.is_self


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

        `batches` are this cell's. Collective over the agent where there are such losses.
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

    `replayed_L2` holds the replayed choices that differ from the router's own, and all replayed ones.
    """
    total_L1 = counts_LE.sum(dim=1, keepdim=True)
    if not total_L1.all():
        return None
    shares_LE = counts_LE.double() / total_L1
    entropy_L = torch.special.entr(shares_LE).sum(dim=1) / math.log(max(2, counts_LE.shape[1]))
    changed, replayed = (0, 0) if replayed_L2 is None else replayed_L2.sum(dim=0).tolist()
    share = changed / replayed if replayed else None
    return ExpertLoad(shares_LE.amax(dim=1).mean().item(), entropy_L.mean().item(), share)
