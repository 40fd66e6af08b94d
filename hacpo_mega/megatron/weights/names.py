"""Mapping between a live Megatron model's parameters and Hugging Face tensors, and loading a folder of these.

Only the rows and columns of this rank's segments are read, slice by slice.

Elsewhere: the arithmetic of shards, which needs no model (models/sharding/segments.py).
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from hacpo_mega.megatron.model.model import HiddenStateModel, unwrapped
from hacpo_mega.megatron.weights.hf_reader import FolderReader
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.weight_files import weight_problems
from hacpo_mega.models.sharding.lora import adapter_slots
from hacpo_mega.models.sharding.segments import Cut, Slot, Source, rank_slots, segments

# A norm of the local layers -> the parameter with its weight in TransformerEngine's layers.
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def slots_of(model: HiddenStateModel, pp_rank: int) -> tuple[Slot, ...]:
    """Slots of pipeline stage `pp_rank` of the model that `model` is a part of, in a fixed order."""
    slots = rank_slots(model.architecture, model.chunks, model.config.pipeline_model_parallel_size, pp_rank)
    return tuple(_fused(slot, model.architecture) for slot in slots) if model.fuses_norms else slots


def _fused(slot: Slot, architecture: Architecture) -> Slot:
    """Slot for TransformerEngine's layers: a norm's weight is part of the projection after it, but for experts."""
    for norm, parameter in FUSED_NORMS.items():
        is_fused = "mlp." not in parameter or not architecture.has_experts
        if is_fused and slot.parameter.endswith(f".{norm}"):
            return replace(slot, parameter=f"{slot.parameter.removesuffix(norm)}{parameter}")
    return slot


def trained_slots(model: HiddenStateModel, pp_rank: int) -> tuple[Slot, ...]:
    """Slots of the trained parameters: under LoRA the factors of its adapters, else all."""
    if model.lora is None:
        return slots_of(model, pp_rank)
    pp = model.config.pipeline_model_parallel_size
    return adapter_slots(model.architecture, model.chunks, pp, pp_rank, model.lora)


def sources_of(model: HiddenStateModel) -> tuple[Source, ...]:
    """Every Hugging Face tensor of the whole model, stage by stage, each once."""
    stages = range(model.config.pipeline_model_parallel_size)
    slots = (slot for stage in stages for slot in slots_of(model, stage))
    return tuple(dict.fromkeys(source for slot in slots for source in slot.sources))


def shard_coordinates(model: HiddenStateModel) -> dict[str, int]:
    """Shard coordinates of this rank for segments.py: tp, tp_rank, ep, ep_rank."""
    tp, ep = model.pg_collection.tp, model.pg_collection.ep
    return {"tp": tp.size(), "tp_rank": tp.rank(), "ep": ep.size(), "ep_rank": ep.rank()}


def write_back(
    full: tuple[torch.Tensor, ...],
    shard: torch.Tensor,
    slot: Slot,
    architecture: Architecture,
    **place: int,
) -> None:
    """Copies the shard of the rank at `place` into the full tensors of `slot.sources`; padding is dropped.

    shard has the shape of `shard_shape(slot)`, full[i] that of `slot.sources[i]`.
    """
    position = 0
    for piece in segments(slot, architecture, **place):
        size = piece.stop - piece.start
        full[piece.source].narrow(slot.dim, piece.start, size).copy_(shard.narrow(slot.dim, position, size))
        position += size


def load_hf_weights(model: torch.nn.Module, folder: Path) -> None:
    """Fills this rank's parameters from `folder`, converted to their dtype.

    Raises ValueError, a line per problem, if the folder's tensors are not those of the architecture (see
    weight_problems), or if a number that this rank reads is not finite.
    """
    bare, folder = unwrapped(model), Path(folder)
    architecture = bare.architecture
    wanted = {source.name: source.shape for source in sources_of(bare)}
    if problems := weight_problems(folder, wanted, family=architecture.family, tied=architecture.tied):
        raise ValueError("\n".join(problems))
    with ExitStack() as stack, torch.no_grad():
        reader = FolderReader(folder, stack)
        tensors, pp_rank = dict(bare.named_parameters()), bare.pg_collection.pp.rank()
        slots = slots_of(bare, pp_rank)
        assert {slot.parameter for slot in slots} == set(tensors), {slot.parameter for slot in slots} ^ set(tensors)
        for slot in slots:
            _fill(tensors[slot.parameter], slot, bare, reader)


def _fill(parameter: torch.nn.Parameter, slot: Slot, model: HiddenStateModel, reader: FolderReader) -> None:
    position = 0
    for piece in segments(slot, model.architecture, **shard_coordinates(model)):
        size = piece.stop - piece.start
        stored = reader.read(slot.sources[piece.source], piece.start, piece.stop, dim=slot.dim)
        parameter.narrow(slot.dim, position, size).copy_(stored)
        position += size
    if slot.cut is Cut.VOCAB:
        parameter[position:].zero_()
    else:
        assert position == parameter.shape[slot.dim], (slot, position, parameter.shape)
