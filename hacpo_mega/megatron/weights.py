"""Reading a Hugging Face folder of safetensors into this rank's Megatron model, slice by slice.

Only the rows and columns of this rank's segments are read. Not here: how a parameter is cut (models/segments.py), what
the files of a folder hold (models/weight_files.py), writing (reshard.py).
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hacpo_mega.megatron.model import HiddenStateModel, unwrapped
from hacpo_mega.megatron.names import place_of, slots_of, sources_of
from hacpo_mega.models.segments import Cut, Slot, Source, segments
from hacpo_mega.models.weight_files import StoredTensor, stored_tensors, weight_problems


def load_hf_weights(model: torch.nn.Module, folder: Path) -> None:
    """Fill this rank's parameters from `folder`, converting to their dtype.

    Raises ValueError, a line per problem, if the folder's tensors are not those of the architecture (weight_problems
    says what that includes), or if a number among those that this rank reads is not finite.
    """
    bare, folder = unwrapped(model), Path(folder)
    architecture = bare.architecture
    wanted = {source.name: source.shape for source in sources_of(bare)}
    if problems := weight_problems(folder, wanted, family=architecture.family, tied=architecture.tied):
        raise ValueError("\n".join(problems))
    with ExitStack() as stack, torch.no_grad():
        reader = _Reader(folder, stack)
        tensors, pp_rank = dict(bare.named_parameters()), bare.pg_collection.pp.rank()
        slots = slots_of(bare, pp_rank)
        assert {slot.parameter for slot in slots} == set(tensors), {slot.parameter for slot in slots} ^ set(tensors)
        for slot in slots:
            _fill(tensors[slot.parameter], slot, bare, reader)


class _Reader:
    """The tensors of a folder by name, over its safetensors files, which stay open until `stack` closes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.stored: dict[str, StoredTensor] = stored_tensors(folder)
        self.open_files: dict[str, Any] = {}

    def read(self, source: Source, start: int, stop: int, *, dim: int) -> torch.Tensor:
        """Rows (dim 0) or columns (dim 1) start:stop. ValueError when a number there is not finite."""
        piece = self._slice(source)[:, start:stop] if dim else self._slice(source)[start:stop]
        if num_bad := piece.numel() - int(piece.isfinite().sum()):
            raise ValueError(
                f"{self.folder / self.stored[source.name].file}: {source.name} holds {num_bad} numbers that are not "
                f"finite (NaN or infinite) among {piece.numel()} read; copy the model again or take another checkpoint"
            )
        return piece

    def _slice(self, source: Source) -> Any:
        name = self.stored[source.name].file
        if name not in self.open_files:
            self.open_files[name] = self.stack.enter_context(safe_open(self.folder / name, framework="pt"))
        return self.open_files[name].get_slice(source.name)


def _fill(parameter: torch.nn.Parameter, slot: Slot, model: HiddenStateModel, reader: _Reader) -> None:
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
