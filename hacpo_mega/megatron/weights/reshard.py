"""Full Hugging Face tensors from Megatron shards: for a folder on disk, and for fallback tensors of an engine.

Every rank of a cell receives every full tensor, a bucket at a time: one broadcast along the pipeline from the stage
that owns the bucket, then one all-gather over tensor parallelism, or over the ranks that share experts: cells that
share them do it together, and "cell" below means all of them. In this order only a shard crosses the pipeline, whose
stages may be nodes apart.

Elsewhere: how a parameter is cut (names.py), the files of a folder (hf_writer.py), shard-by-shard sync (publish.py).
"""

import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError

from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.megatron.model.model import HiddenStateModel, unwrapped
from hacpo_mega.megatron.weights.hf_reader import dtype_of
from hacpo_mega.megatron.weights.hf_writer import (
    ADAPTER,
    FILE_BYTES,
    copy_beside_weights,
    finite,
    name_end,
    write_adapter,
    write_weights,
)
from hacpo_mega.megatron.weights.lora import HeldWeights
from hacpo_mega.megatron.weights.names import shard_coordinates, slots_of, sources_of, trained_slots, write_back
from hacpo_mega.models.sharding.segments import Cut, Slot, Source, shard_shape

BUCKET_BYTES = 1 << 30


@dataclass(frozen=True)
class _Bucket:
    """Neighbouring slots of one pipeline stage that travel together: of one type, over the ranks that share them."""

    stage: int
    slots: tuple[Slot, ...]
    shared_by: str
    dtype: torch.dtype

    @classmethod
    def of(cls, stage: int, slots: Sequence[Slot], model: HiddenStateModel) -> "_Bucket":
        """Bucket of slots with equal group and type."""
        return cls(stage, tuple(slots), *_group_and_dtype(slots[0], model))


def full_tensors(
    model: torch.nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    sent: Callable[[str, int], None] = lambda *_: None,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every Hugging Face tensor (name, full tensor in its type), in one order on every rank of the cell.

    Collective over the cell: all of its ranks must take the same number of items. About `bucket_bytes` of full tensors
    are alive at a time, and the caller owns each yielded tensor. A tied embedding comes once, under its own name.
    `sent` is called with the group (pp, tp or ep) and the bytes that this rank sends. With `only`, nothing but those
    names. Adapters are merged.
    """
    bare = unwrapped(model)
    held = HeldWeights(bare)
    for bucket in _buckets(bare, slots_of, bucket_bytes, only):
        shards_RN = _gather(bucket, bare, held.shard, sent)
        for name, tensor in _unpack(bucket, bare, shards_RN):
            if only is None or name in only:
                yield name, tensor


def full_adapters(model: HiddenStateModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the factors of all adapters by peft's names; collective as `full_tensors`."""
    for bucket in _buckets(model, trained_slots, BUCKET_BYTES, None):
        shards_RN = _gather(bucket, model, lambda slot: model.get_parameter(slot.parameter).detach(), lambda *_: None)
        yield from _unpack(bucket, model, shards_RN)


def save_hf(
    model: torch.nn.Module,
    source_folder: Path,
    out_folder: Path,
    dtype: torch.dtype,
    *,
    file_bytes: int = FILE_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    added_end: int | None = None,
) -> None:
    """Writes the model as a Hugging Face folder that replaces `out_folder` at once, or not at all.

    Adapters are merged, and also written in peft's format in a subfolder.
    RunStopped, on every rank of the cell, for a tensor that is not finite in `dtype`; OSError, on the writing rank, if
    the disk refuses it. Nothing of the folder is left then.
    Collective over the cell, ranks of cp included; its first rank writes. Weights are converted to `dtype` and split
    into files of about `file_bytes`; configuration, tokenizer and generation files are those of `source_folder`;
    `added_end` is one more token that ends an answer.
    """
    is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    writes = is_first_replica and parallel_state.get_model_parallel_group().rank() == 0
    partial = out_folder.with_name(f".{out_folder.name}.partial")
    bare = unwrapped(model)
    tensors = finite(full_tensors(model, bucket_bytes=bucket_bytes), dtype, out_folder)
    factors = finite(full_adapters(bare), dtype, out_folder) if bare.lora is not None else iter(())
    failed: Exception | None = None
    try:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            copy_beside_weights(source_folder, partial, dtype)
            name_end(partial, added_end)
        write_weights(
            tensors, sources_of(bare), partial, dtype, base=source_folder, file_bytes=file_bytes, writes=writes
        )
        adapter = {name: tensor.cpu() for name, tensor in factors if writes}
        if writes:
            if bare.lora is not None:
                (partial / ADAPTER).mkdir()
                write_adapter(adapter, bare.lora, source_folder, partial / ADAPTER)
            _put_in_place(partial, out_folder)
    except RunStopped:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        failed = error
        for _ in chain(tensors, factors):  # the other ranks of the cell wait in its collectives
            pass
    # After the barrier every rank may read the folder.
    dist.barrier(group=parallel_state.get_model_parallel_group())
    if failed is not None:
        raise OSError(f"{out_folder} is not written: {failed}") from failed


def _buckets(
    model: HiddenStateModel,
    slots_of_stage: Callable[[HiddenStateModel, int], tuple[Slot, ...]],
    bucket_bytes: int,
    only: Container[str] | None,
) -> Iterator[_Bucket]:
    """All slots with a wanted tensor, each tensor once, in buckets of at most bucket_bytes or a single slot."""
    seen: set[Source] = set()
    for stage in range(model.config.pipeline_model_parallel_size):
        waiting, size = [], 0
        for slot in slots_of_stage(model, stage):
            is_wanted = only is None or any(source.name in only for source in slot.sources)
            if not is_wanted or seen.issuperset(slot.sources):
                continue
            seen.update(slot.sources)
            shared_by, dtype = _group_and_dtype(slot, model)
            slot_bytes = _num_elements(slot, model) * getattr(model.pg_collection, shared_by).size() * dtype.itemsize
            is_other = waiting and _group_and_dtype(waiting[-1], model) != (shared_by, dtype)
            if is_other or (waiting and size + slot_bytes > bucket_bytes):
                yield _Bucket.of(stage, waiting, model)
                waiting, size = [], 0
            waiting.append(slot)
            size += slot_bytes
        if waiting:
            yield _Bucket.of(stage, waiting, model)


def _gather(
    bucket: _Bucket,
    model: HiddenStateModel,
    shard_of: Callable[[Slot], torch.Tensor],
    sent: Callable[[str, int], None],
) -> torch.Tensor:
    """Flat shards of a bucket, [ranks that share it, elements of a shard], on every rank of the cell."""
    group, pp = getattr(model.pg_collection, bucket.shared_by), model.pg_collection.pp
    if pp.rank() == bucket.stage:
        shard_N = torch.cat([shard_of(slot).flatten() for slot in bucket.slots])
    else:
        size = sum(_num_elements(slot, model) for slot in bucket.slots)
        shard_N = torch.empty(size, dtype=bucket.dtype, device=next(model.parameters()).device)
    if pp.size() > 1:
        sent("pp", (pp.size() - 1) * shard_N.nbytes * (pp.rank() == bucket.stage))
        dist.broadcast(shard_N, group=pp, group_src=bucket.stage)
    if group.size() == 1:
        return shard_N[None]
    sent(bucket.shared_by, (group.size() - 1) * shard_N.nbytes)
    shards_RN = shard_N.new_empty(group.size() * shard_N.numel())
    dist.all_gather_into_tensor(shards_RN, shard_N, group=group)
    return shards_RN.view(group.size(), -1)


def _unpack(bucket: _Bucket, model: HiddenStateModel, shards_RN: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors of a bucket, each in new memory."""
    position, place = 0, shard_coordinates(model)
    for slot in bucket.slots:
        shape, size = _shape(slot, model), _num_elements(slot, model)
        full = tuple(shards_RN.new_empty(source.shape) for source in slot.sources)
        for rank, shard_N in enumerate(shards_RN):
            shard = shard_N[position : position + size].view(shape)
            write_back(full, shard, slot, model.architecture, **place | {f"{bucket.shared_by}_rank": rank})
        position += size
        for source, tensor in zip(slot.sources, full, strict=True):
            yield source.name, tensor


def _num_elements(slot: Slot, model: HiddenStateModel) -> int:
    return torch.Size(_shape(slot, model)).numel()


def _shape(slot: Slot, model: HiddenStateModel) -> tuple[int, ...]:
    groups = model.pg_collection
    return shard_shape(slot, model.architecture, tp=groups.tp.size(), ep=groups.ep.size())


def _group_and_dtype(slot: Slot, model: HiddenStateModel) -> tuple[str, torch.dtype]:
    """Group whose ranks have the shards, and their type."""
    return "ep" if slot.cut is Cut.EXPERTS else "tp", dtype_of(slot.sources[0].name, model.config.params_dtype)


def _put_in_place(partial: Path, out: Path) -> None:
    """Renames a finished folder to its name; an older one steps aside first and is removed afterwards."""
    older = out.with_name(f".{out.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if out.exists():
        out.rename(older)
    partial.rename(out)
    shutil.rmtree(older, ignore_errors=True)
