"""Matrix products in the dtype of their sum: bf16 operands are summed in float32, not rounded between partial sums.

torch's own float32 products on a CPU are MKL's, which leaves half of AVX-512's width unused on AMD processors.
oneDNN's, which come with torch, use all of it, so they run there unless `torch.backends.mkldnn.enabled` is off. Without
AVX-512 MKL's are faster (docs/measurements/profile.md). The choice depends on the type of processor, not on a timing:
all ranks on one type, and a run that is resumed there, get the same bits.
"""

import torch

# False with ATEN_CPU_CAPABILITY=avx2, too.
PREFERS_ONEDNN = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# Numbers of a product that are added to a sum at once, few enough to be in the cache still.
ADDED_AT_ONCE = 1 << 20


def product(left_MK: torch.Tensor, right_KN: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """left [..., M, K] @ right [K, N] in `dtype`, by default the operands'. For use inside autograd functions.

    With a gradient wanted it is torch's own product.
    """
    if dtype is None or left_MK.dtype == right_KN.dtype == dtype:
        if _suits_onednn(left_MK, right_KN):
            return torch.ops.mkldnn._linear_pointwise.default(left_MK, right_KN.t(), None, "none", [], "")
        return left_MK @ right_KN
    if left_MK.is_cuda and left_MK.dtype == right_KN.dtype:
        return torch.mm(left_MK, right_KN, out_dtype=dtype)
    return product(left_MK.to(dtype), right_KN.to(dtype))


def add_product(total_MN: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor) -> None:
    """total [M, N] += left [M, K] @ right [K, N], in place, in the dtype of `total`: float32 over all chunks."""
    if left_MK.is_cuda and left_MK.dtype == right_KN.dtype != total_MN.dtype:
        torch.addmm(total_MN, left_MK, right_KN, out_dtype=total_MN.dtype, out=total_MN)
        return
    left_MK, right_KN = left_MK.to(total_MN.dtype), right_KN.to(total_MN.dtype)
    if not _suits_onednn(left_MK, right_KN):
        total_MN.addmm_(left_MK, right_KN)
        return
    rows = max(1, ADDED_AT_ONCE // total_MN.shape[1])
    for block_MN, block_MK in zip(total_MN.split(rows), left_MK.split(rows), strict=True):
        block_MN += product(block_MK, right_KN)


def _suits_onednn(left_MK: torch.Tensor, right_KN: torch.Tensor) -> bool:
    """True for float32 on the CPU, a contiguous right matrix, and no gradient wanted: torch's operator has none."""
    return (
        left_MK.dtype == right_KN.dtype == torch.float32
        and left_MK.device.type == "cpu"
        and PREFERS_ONEDNN
        and torch.backends.mkldnn.enabled
        and torch.backends.mkldnn.is_available()
        and (right_KN.is_contiguous() or right_KN.t().is_contiguous())
        and min(left_MK.numel(), right_KN.numel()) > 0
        and not (torch.is_grad_enabled() and (left_MK.requires_grad or right_KN.requires_grad))
    )
