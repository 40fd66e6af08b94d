"""Matrix products in the dtype of their sum: bf16 operands are added up in float32, not rounded between partial sums.

torch's own float32 products on a CPU are MKL's, which leaves half of an AMD processor's vector width unused. Those of
oneDNN, which comes with torch, use all of it: they are what runs here (docs/measurements/profile.md), unless
`torch.backends.mkldnn.enabled` is switched off.
"""

import torch

# Numbers of a product that is added to a sum: so many are still in the cache when they are.
ADDED_AT_ONCE = 1 << 20


def product(left_MK: torch.Tensor, right_KN: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """left @ right in `dtype`, or in that of both; M may be several dimensions. Made for autograd functions: what
    wants a gradient is multiplied by torch.
    """
    if dtype is None or left_MK.dtype == right_KN.dtype == dtype:
        if _suits_onednn(left_MK, right_KN):
            return torch.ops.mkldnn._linear_pointwise.default(left_MK, right_KN.t(), None, "none", [], "")
        return left_MK @ right_KN
    if left_MK.is_cuda and left_MK.dtype == right_KN.dtype:
        return torch.mm(left_MK, right_KN, out_dtype=dtype)
    return product(left_MK.to(dtype), right_KN.to(dtype))


def add_product(total_MN: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor) -> None:
    """total += left @ right, in place, in the dtype of `total`: float32 over all chunks, however many there are."""
    if left_MK.is_cuda and left_MK.dtype == right_KN.dtype != total_MN.dtype:
        torch.addmm(total_MN, left_MK, right_KN, out_dtype=total_MN.dtype, out=total_MN)
        return
    left_MK, right_KN = left_MK.to(total_MN.dtype), right_KN.to(total_MN.dtype)
    if not _suits_onednn(left_MK, right_KN):
        total_MN.addmm_(left_MK, right_KN)
        return
    rows = max(1, ADDED_AT_ONCE // total_MN.shape[1])
    for some_MN, some_MK in zip(total_MN.split(rows), left_MK.split(rows), strict=True):
        some_MN += product(some_MK, right_KN)


def _suits_onednn(left_MK: torch.Tensor, right_KN: torch.Tensor) -> bool:
    """Float32 on the CPU, a matrix that lies in one piece, and no gradient wanted: torch's operator has none."""
    return (
        left_MK.dtype == right_KN.dtype == torch.float32
        and left_MK.device.type == "cpu"
        and torch.backends.mkldnn.enabled
        and torch.backends.mkldnn.is_available()
        and (right_KN.is_contiguous() or right_KN.t().is_contiguous())
        and min(left_MK.numel(), right_KN.numel()) > 0
        and not (torch.is_grad_enabled() and (left_MK.requires_grad or right_KN.requires_grad))
    )
