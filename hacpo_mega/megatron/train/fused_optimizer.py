"""Fused kernels of an actor's optimizer: Adam, the global gradient norm, and gradient scaling in clipping.

TransformerEngine and apex have each of these kernels as one launch over a list of tensors. Megatron takes the first
package that it can import, for the whole process, even if its kernels cannot run; here the configuration decides. All
compute Adam with decoupled weight decay on the same fp32 state, so checkpoints do not depend on the choice.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

import megatron.core.optimizer as construction
import torch
from megatron.core import utils as local
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

from hacpo_mega.megatron.model.installed import APEX_VERSION, TE_VERSION

VERSIONS = {"te": f"TransformerEngine {TE_VERSION}", "apex": f"apex {APEX_VERSION}"}
VERSIONS["torch"] = f"torch {torch.__version__}"


class Kernels(NamedTuple):
    """Functions of one implementation; `apply(op, flag, lists, *arguments)` runs `l2norm` or `scale` on lists of
    tensors.
    """

    adam: type[torch.optim.Optimizer]
    apply: Callable[..., Any]
    l2norm: Callable[..., Any]
    scale: Callable[..., Any]


def _norm_of_all(_chunk: int, _flag: torch.Tensor, lists: list[list[torch.Tensor]], _of_each: bool) -> tuple:
    """Global norm [1], bit-identical to Megatron's, but without a host wait for the norm of every tensor."""
    norms = torch.stack(torch._foreach_norm(lists[0]))
    return torch.linalg.vector_norm(norms)[None], None


def _scale_all(_chunk: int, _flag: torch.Tensor, lists: list[list[torch.Tensor]], scale: float) -> None:
    """Megatron's scaling, in a few launches for all tensors instead of two for each."""
    read, written = lists
    if not written:
        return
    if any(a is not b for a, b in zip(read, written, strict=True)):
        torch._foreach_copy_(written, read)
    torch._foreach_mul_(written, scale)


# Installed implementations, in the order of preference of "auto". installed.py has refused incomplete ones.
INSTALLED: dict[str, Kernels] = {}
with suppress(ImportError):
    from transformer_engine.pytorch import optimizers as te

    INSTALLED["te"] = Kernels(te.FusedAdam, te.multi_tensor_applier, te.multi_tensor_l2norm, te.multi_tensor_scale)
with suppress(ImportError):
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam

    INSTALLED["apex"] = Kernels(FusedAdam, multi_tensor_applier, amp_C.multi_tensor_l2norm, amp_C.multi_tensor_scale)
INSTALLED["torch"] = Kernels(torch.optim.AdamW, local.local_multi_tensor_applier, _norm_of_all, _scale_all)


def chosen_kernels(asked: str, *, on_cuda: bool, installed: Collection[str] = tuple(INSTALLED)) -> str:
    """Implementation ("te", "apex" or "torch") for an optimizer that asks for "auto" or one of them.

    `installed` lists the installed ones, best first. ValueError, in one line, if the asked one cannot be used.
    """
    if asked == "auto":
        return next(name for name in installed if on_cuda or name == "torch")
    if asked not in installed:
        raise ValueError(
            f'optimizer.kernels = "{asked}", but {VERSIONS[asked].partition(" ")[0]} is not installed here: build it '
            '(launch/image/Dockerfile), or set "auto"'
        )
    if asked != "torch" and not on_cuda:
        raise ValueError(f'optimizer.kernels = "{asked}" is for CUDA, and this actor is on the CPU: set "auto"')
    return asked


def use_kernels(name: str) -> None:
    """Makes Megatron build and run optimizers with these kernels, in the whole process, from now on."""
    kernels = INSTALLED[name]
    construction.USING_PYTORCH_OPTIMIZER = name == "torch"
    construction.Adam = distrib_optimizer.Adam = kernels.adam
    clip_grads.multi_tensor_applier = optimizer.multi_tensor_applier = kernels.apply
    clip_grads.multi_tensor_scale_impl = optimizer.multi_tensor_scale_impl = kernels.scale
    clip_grads.l2_norm_impl = kernels.l2norm
