"""Tensors of a Hugging Face folder, a slice at a time. Imports no Megatron.

Elsewhere: the files of a folder (models/files/weight_files.py), the slices of a rank (names.py).
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hacpo_mega.models.files.stacked_experts import unpacked_tensor
from hacpo_mega.models.files.weight_files import CORRECTION, EXPERT_BIAS, StoredTensor, stored_tensors
from hacpo_mega.models.sharding.segments import Source


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Type of a tensor in a model, a folder and an engine of `dtype`: a router's bias is float32 in all of them."""
    return torch.float32 if name.endswith((CORRECTION, EXPERT_BIAS)) else dtype


class FolderReader:
    """Tensors of a folder by name, over its safetensors files, which stay open until `stack` closes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.stored: dict[str, StoredTensor] = stored_tensors(folder)
        self.open_files: dict[str, Any] = {}

    def read(self, source: Source, start: int, stop: int, *, dim: int) -> torch.Tensor:
        """Rows (dim 0) or columns (dim 1) start:stop. ValueError if a number there is not finite."""
        piece = self._slice(source)[:, start:stop] if dim else self._slice(source)[start:stop]
        if num_bad := piece.numel() - int(piece.isfinite().sum()):
            raise ValueError(
                f"{self.folder / self.stored[source.name].file}: {source.name} holds {num_bad} numbers that are not "
                f"finite (NaN or infinite) among {piece.numel()} read; copy the model again or take another checkpoint"
            )
        return piece

    def _slice(self, source: Source) -> Any:
        stored = self.stored[source.name]
        return unpacked_tensor(stored, self._read) if stored.is_packed else self._opened(stored)

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        return self._opened(stored)[:] if stored.expert is None else self._opened(stored)[stored.expert]

    def _opened(self, stored: StoredTensor) -> Any:
        if stored.file not in self.open_files:
            opened = safe_open(self.folder / stored.file, framework="pt")
            self.open_files[stored.file] = self.stack.enter_context(opened)
        return self.open_files[stored.file].get_slice(stored.name)
