"""Whole weights of an agent's stored state, for one process: exports and evaluations.

With LoRA the state has the adapters; they are merged into the weights of the model folder.

Not here: the files of a state (stored_state.py), merging (merging.py). Imports no Megatron.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from hacpo_mega.megatron.checkpoint.stored_state import stored_weights
from hacpo_mega.megatron.weights.hf_reader import FolderReader, dtype_of
from hacpo_mega.megatron.weights.merging import merged
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.lora import Lora, adapter_sources, factor_names
from hacpo_mega.models.sharding.segments import all_sources


def model_weights(state: Path, base: Path, lora: Lora | None, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model by name; `base` is the folder that its run began with, `dtype` the run's.

    One tensor is in memory at a time, and all adapters. Not collective.
    """
    architecture = Architecture.from_folder(base)
    sources = all_sources(architecture)
    if lora is None:
        yield from stored_weights(state, sources, dtype)
        return
    factors = dict(stored_weights(state, adapter_sources(architecture, lora), dtype))
    with ExitStack() as stack:
        reader = FolderReader(base, stack)
        for source in sources:
            weight = reader.read(source, 0, source.shape[0], dim=0).to(dtype_of(source.name, dtype))
            down, up = factor_names(source.name)
            yield source.name, merged(weight, factors[up], factors[down], lora.scale) if down in factors else weight
