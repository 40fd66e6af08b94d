"""Loads a Hugging Face folder of safetensors into this rank's Megatron model, slice by slice.

Only the rows and columns of this rank's segments are read.

Not here: how a parameter is cut (models/sharding/segments.py), the files of a folder (models/files/weight_files.py),
writing (reshard.py).
"""

from contextlib import ExitStack
from pathlib import Path

import torch

from hacpo_mega.megatron.model.model import HiddenStateModel, unwrapped
from hacpo_mega.megatron.weights.hf_reader import FolderReader
from hacpo_mega.megatron.weights.names import place_of, slots_of, sources_of
from hacpo_mega.models.files.weight_files import weight_problems
from hacpo_mega.models.sharding.segments import Cut, Slot, segments


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
    for piece in segments(slot, model.architecture, **place_of(model)):
        size = piece.stop - piece.start
        stored = reader.read(slot.sources[piece.source], piece.start, piece.stop, dim=slot.dim)
        parameter.narrow(slot.dim, position, size).copy_(stored)
        position += size
    if slot.cut is Cut.VOCAB:
        parameter[position:].zero_()
    else:
        assert position == parameter.shape[slot.dim], (slot, position, parameter.shape)
