"""Micro-batch helpers: balance counts across cells, report progress, move to device, look up, summarise.

Not here: computation (actor.py), packing (samples/packing.py).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hacpo_mega.megatron.train.even_batches import evened
from hacpo_mega.megatron.train.optimizer import OptimizerStep
from hacpo_mega.records import ExpertLoad, MicroBatch, TokenSequence, UpdateStats


class EvenBatches(list):
    """Micro-batches with counts balanced across cells (even_batches.py); iteration reports progress."""

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
