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
    gated_activation: Callable[[torch.Tensor, str], torch.Tensor]
    activation_gradient: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, float], tuple[torch.Tensor, torch.Tensor]]
    rms_norm_gradient: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    rotate_heads: Callable[[torch.Tensor, torch.Tensor, bool, bool], torch.Tensor]
    merge_adapter: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    combine_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    combine_gradients: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    add_grouped_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


REFERENCE = Backend(
    logit_stats=reference.logit_stats,
    logit_gradient=reference.logit_gradient,
    operand=reference.operand,
    chunk_rows=reference.chunk_rows,
    segment_sum=reference.segment_sum,
    packed_objective=reference.packed_objective,
    gated_activation=reference.gated_activation,
    activation_gradient=reference.activation_gradient,
    rms_norm=reference.rms_norm,
    rms_norm_gradient=reference.rms_norm_gradient,
    rotate_heads=reference.rotate_heads,
    merge_adapter=reference.merge_adapter,
    combine_rows=reference.combine_rows,
    combine_gradients=reference.combine_gradients,
    add_grouped_product=reference.add_grouped_product,
)
TRITON = Backend(
    logit_stats=triton_logprob.logit_stats,
    logit_gradient=triton_logprob.logit_gradient,
    operand=triton_logprob.operand,
    chunk_rows=triton_logprob.chunk_rows,
    segment_sum=triton_objective.segment_sum,
    packed_objective=triton_objective.packed_objective,
    gated_activation=elementwise.gated_activation,
    activation_gradient=elementwise.activation_gradient,
    rms_norm=elementwise.rms_norm,
    rms_norm_gradient=elementwise.rms_norm_gradient,
    rotate_heads=elementwise.rotate_heads,
    merge_adapter=elementwise.merge_adapter,
    combine_rows=experts.combine_rows,
    combine_gradients=experts.combine_gradients,
    add_grouped_product=experts.add_grouped_product,
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
