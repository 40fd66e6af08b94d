"""Reading a Hugging Face folder of safetensors into this rank's Megatron model, slice by slice.

Only the rows and columns of this rank's segments are read. Not here: how a parameter is cut (names.py), writing
(reshard.py).
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hacpo_mega.megatron.model import HiddenStateModel, unwrapped
from hacpo_mega.megatron.names import Cut, Slot, Source, segments, stage_slots

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
# Buffers that some folders store although they follow from the configuration.
DERIVED = "rotary_emb.inv_freq"


def load_hf_weights(model: torch.nn.Module, folder: Path) -> None:
    """Fill this rank's parameters from `folder`, converting to their dtype.

    Raises ValueError if the folder holds no safetensors, or if a tensor is missing, unknown to the architecture, or of
    another shape. Sharded folders (an index and several files) are read slice by slice too.
    """
    bare = unwrapped(model)
    with ExitStack() as stack, torch.no_grad():
        reader = _Reader(Path(folder), stack)
        check_names(reader.names, bare, folder)
        tensors, pp_rank = dict(bare.named_parameters()), bare.pg_collection.pp.rank()
        slots = stage_slots(bare, pp_rank)
        assert {slot.parameter for slot in slots} == set(tensors), {slot.parameter for slot in slots} ^ set(tensors)
        for slot in slots:
            _fill(tensors[slot.parameter], slot, bare, reader)


def check_names(found: set[str], model: HiddenStateModel, folder: Path) -> None:
    """Raise ValueError if the tensors of a folder are not exactly those of the architecture."""
    architecture = model.architecture
    wanted = {source.name for source in all_sources(model)}
    # A tied folder may keep its head; it is the embedding, by the configuration's word.
    allowed = wanted | ({"lm_head.weight"} if architecture.tied else set())
    missing = sorted(wanted - found)
    extra = sorted(name for name in found - allowed if not name.endswith(DERIVED))
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of this {architecture.family} model: {_some(missing)}")
    if extra:
        raise ValueError(f"{folder} has {len(extra)} tensors unknown to {architecture.family}: {_some(extra)}")


def all_sources(model: HiddenStateModel) -> Iterator[Source]:
    """Every Hugging Face tensor of the whole model, stage by stage, each once."""
    seen = set()
    for pp_rank in range(model.config.pipeline_model_parallel_size):
        for slot in stage_slots(model, pp_rank):
            for source in slot.sources:
                if source.name not in seen:
                    seen.add(source.name)
                    yield source


class _Reader:
    """The tensors of a folder by name, over its safetensors files, which stay open until `stack` closes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.open_files = folder, stack, {}
        self.file_of = self._tensor_files()

    @property
    def names(self) -> set[str]:
        return set(self.file_of)

    def slice(self, source: Source) -> Any:
        """A lazy safetensors slice of `source`; raises ValueError if the stored shape is another."""
        stored = self._opened(self.file_of[source.name]).get_slice(source.name)
        if tuple(stored.get_shape()) != source.shape:
            raise ValueError(
                f"{self.folder}: {source.name} has shape {tuple(stored.get_shape())}; config.json says {source.shape}"
            )
        return stored

    def _opened(self, name: str) -> Any:
        if name not in self.open_files:
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{self.folder} names {name} in its index but does not hold it")
            self.open_files[name] = self.stack.enter_context(safe_open(path, framework="pt"))
        return self.open_files[name]

    def _tensor_files(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            return json.loads((self.folder / INDEX).read_text())["weight_map"]
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)
        pickles = sorted(path.name for pattern in PICKLES for path in self.folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{self.folder} holds its weights as pickles ({_some(pickles)}), which can run code when read; "
                "convert it to safetensors (save_pretrained of a current transformers does)"
            )
        raise ValueError(f"{self.folder} holds no {SINGLE} and no {INDEX}")


def _fill(parameter: torch.nn.Parameter, slot: Slot, model: HiddenStateModel, reader: _Reader) -> None:
    group = model.pg_collection.tp
    position = 0
    sources = [reader.slice(source) for source in slot.sources]
    for piece in segments(slot, model.architecture, tp=group.size(), tp_rank=group.rank()):
        rows = slice(piece.start, piece.stop)
        stored = sources[piece.source][:, rows] if slot.cut is Cut.COLUMNS else sources[piece.source][rows]
        size = piece.stop - piece.start
        parameter.narrow(slot.dim, position, size).copy_(stored)
        position += size
    if slot.cut is Cut.VOCAB:
        parameter[position:].zero_()
    else:
        assert position == parameter.shape[slot.dim], (slot, position, parameter.shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
