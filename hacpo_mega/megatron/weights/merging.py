"""Adapter merged into its matrix: W + alpha / rank * B A, with the same bits for any part of it on any layout.

A matrix product may sum in another order for another shape, so it is made one rank at a time, each rounded by itself:
float32 for the sum, W's type for the result. These are the weights that are published, exported, or read from a
checkpoint. W itself is never written. Imports no Megatron.
"""

import torch
from torch import Tensor

# Numbers in a block of rows, whose partial sums stay in a processor's cache.
BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}


@torch.no_grad()
def merged(weight_NM: Tensor, up_NR: Tensor, down_RM: Tensor, scale: float) -> Tensor:
    """W + scale * B A [N, M] of these rows and columns of W [N, M], B [N, R] and A [R, M], in new memory."""
    up_NR, down_RM = up_NR.float() * scale, down_RM.float()
    whole_NM = torch.empty_like(weight_NM, memory_format=torch.contiguous_format)
    rows = max(1, BLOCK[weight_NM.device.type] // weight_NM.shape[1])
    for weight_nM, up_nR, out_nM in zip(weight_NM.split(rows), up_NR.split(rows), whole_NM.split(rows), strict=True):
        sum_nM = torch.zeros_like(weight_nM, dtype=torch.float32)
        for column_n, row_M in zip(up_nR.unbind(1), down_RM, strict=True):
            sum_nM.add_(column_n[:, None] * row_M)  # not addcmul, which some processors round once and others twice
        out_nM.copy_(sum_nM.add_(weight_nM))
    return whole_NM
