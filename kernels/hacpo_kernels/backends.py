"""Choice of the backend: Triton for CUDA tensors, plain torch elsewhere, or the caller's choice."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hacpo_kernels import elementwise, experts, reference
from hacpo_kernels import linear_logprob as triton_logprob
from hacpo_kernels import sequence_objective as triton_objective
from hacpo_kernels.reference import Curve, LogitStats, RowGradients


@dataclass(frozen=True)
class Backend:
    """Functions of a backend; reference.py defines each of them."""

    logit_stats: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Curve], LogitStats]
    logit_gradient: Callable[[torch.Tensor, torch.Tensor, Curve, RowGradients], torch.Tensor]
    operand: Callable[[torch.Tensor], torch.Tensor]
    chunk_rows: Callable[[int], int]
    segment_sum: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    packed_objective: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    gated: Callable[[torch.Tensor, str], torch.Tensor]
    gated_gradient: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
    normed: Callable[[torch.Tensor, torch.Tensor, float, float], tuple[torch.Tensor, torch.Tensor]]
    norm_gradient: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    rotated: Callable[[torch.Tensor, torch.Tensor, bool, bool], torch.Tensor]
    merged: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    combine_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    combine_gradients: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    add_grouped_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


REFERENCE = Backend(
    reference.logit_stats,
    reference.logit_gradient,
    reference.operand,
    reference.chunk_rows,
    reference.segment_sum,
    reference.packed_objective,
    reference.gated,
    reference.gated_gradient,
    reference.normed,
    reference.norm_gradient,
    reference.rotated,
    reference.merged,
    reference.combine_rows,
    reference.combine_gradients,
    reference.add_grouped_product,
)
TRITON = Backend(
    triton_logprob.logit_stats,
    triton_logprob.logit_gradient,
    triton_logprob.operand,
    triton_logprob.chunk_rows,
    triton_objective.segment_sum,
    triton_objective.packed_objective,
    elementwise.gated,
    elementwise.gated_gradient,
    elementwise.normed,
    elementwise.norm_gradient,
    elementwise.rotated,
    elementwise.merged,
    experts.combine_rows,
    experts.combine_gradients,
    experts.add_grouped_product,
)


def choose_backend(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> Backend:
    """Triton for CUDA tensors of one of `dtypes`, plain torch for everything else, unless `name` is a backend."""
    if name not in ("auto", "triton", "reference"):
        raise ValueError(f"backend is {name!r}; expected auto, triton or reference")
    if name == "auto":
        name = "triton" if tensor.is_cuda and tensor.dtype in dtypes else "reference"
    if name == "reference":
        return REFERENCE
    if tensor.dtype not in dtypes:
        raise ValueError(f"backend is triton, tensors are {tensor.dtype}; expected one of {dtypes}, or backend auto")
    if not tensor.is_cuda and not triton_logprob.INTERPRETED:
        raise ValueError(
            f"backend is triton, tensors are on {tensor.device}; expected CUDA tensors, backend auto, or "
            "TRITON_INTERPRET=1 in the environment before Python starts"
        )
    return TRITON
