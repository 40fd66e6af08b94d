"""Tensors that TransformerEngine's layers keep and make in bf16, for memory_trace.py to count.

Every function here makes the tensors that TransformerEngine's makes, keeps what it hands to save_for_backward, and
holds the others as long, after the source at its tag v2.9 (70f5366): pytorch/module/layernorm_linear.py and linear.py,
pytorch/ops/basic/rmsnorm.py, pytorch/attention/dot_product_attention/backends.py (FusedAttnFunc) and utils.py
(get_qkv_layout), common/fused_attn/utils.cu. v2.10 (769ed77) and v2.11 (c188b53) make the same, but that 2.11 does not
round up the rows of attention's statistics. No numbers are computed. Tensors that the source frees before a function
ends are held to the end here. Not counted: the workspaces of cuBLAS (32 MiB, of the process), of cuDNN's attention and
of a norm's backward.
"""

from dataclasses import asdict
from typing import Any

import te_stand_in
import torch
from torch.autograd import Function

from hacpo_mega.memory.actor_bytes import ActorPlan


def traces(plans: list[ActorPlan]) -> list[dict[str, int]]:
    """Memory of the plans' models with these layers; te_stand_in must be installed."""
    from memory_cases import traced

    te_stand_in.LayerNormLinear.forward = _layernorm_linear
    te_stand_in.Linear.forward = _linear
    te_stand_in.RMSNorm.forward = lambda norm, hidden: _Norm.apply(hidden.contiguous(), norm.weight)
    te_stand_in.DotProductAttention.forward = _attention
    return [asdict(traced(plan, transformer="te")) for plan in plans]


def statistics_rows(tokens: int) -> int:
    """get_max_tokens of v2.9 and v2.10."""
    return (
        1024 if tokens <= 1024 else 1 << (tokens - 1).bit_length() if tokens <= 32768 else -(-tokens // 32768) * 32768
    )


def _gathered(tensor: torch.Tensor, shards: int) -> torch.Tensor:
    return tensor if shards == 1 else tensor.new_empty(tensor.shape[0] * shards, *tensor.shape[1:])


def _scattered(tensor: torch.Tensor, shards: int) -> torch.Tensor:
    return tensor if shards == 1 else tensor.new_empty(tensor.shape[0] // shards, *tensor.shape[1:])


class _LayerNormLinear(Function):
    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, bias: Any, shards: int):
        inputmat = inp.view(-1, inp.shape[-1])
        ln_out, rsigma = torch.empty_like(inputmat), inputmat.new_empty(len(inputmat), dtype=torch.float32)
        ln_out_total = _gathered(ln_out, shards)
        out = ln_out_total.new_empty(len(ln_out_total), len(weight))
        ctx.save_for_backward(inputmat, weight, bias, norm, ln_out, rsigma)
        ctx.shards, ctx.shape = shards, inp.shape
        return out.view(-1, *inp.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        inputmat, weight, bias, norm, ln_out, _rsigma = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        ln_out_total = _gathered(ln_out, ctx.shards)
        gemm_out = torch.empty_like(ln_out_total)
        dgrad = _scattered(gemm_out, ctx.shards)
        wgrad, grad_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        dgrad = torch.empty_like(inputmat)  # rmsnorm_bwd
        return dgrad.view(ctx.shape), torch.empty_like(norm), wgrad, grad_bias, None


class _Linear(Function):
    """Parallel by rows: with sequence parallelism its output is scattered, and its gradient gathered."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, weight: torch.Tensor, bias: Any, shards: int):
        gemm_out = inp.new_empty(*inp.shape[:-1], len(weight))
        out = _scattered(gemm_out, shards)
        ctx.save_for_backward(inp, weight, bias)
        ctx.shards = shards
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        inp, weight, bias = ctx.saved_tensors
        grad = _gathered(grad.reshape(-1, grad.shape[-1]).contiguous(), ctx.shards)
        dgrad, wgrad = torch.empty_like(inp), torch.empty_like(weight)
        return dgrad, wgrad, None if bias is None else torch.empty_like(bias), None


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor):
        rstdevs = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstdevs)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        _x, weight, _rstdevs = ctx.saved_tensors
        dy = grad.contiguous()
        return torch.empty_like(dy), torch.empty_like(weight)


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor):
        out, rng_state = torch.empty_like(q), q.new_empty(2, dtype=torch.int64)
        stats = q.new_empty(statistics_rows(len(q)), q.shape[1], 1, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, starts, stats, rng_state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        q, k, v, *_ = ctx.saved_tensors
        d_out = grad.contiguous()
        assert d_out.shape == q.shape
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _layernorm_linear(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
    bias = self.bias if self.use_bias and not self.return_bias else None
    out = _LayerNormLinear.apply(inp, self.layer_norm_weight, self.weight, bias, self.gathers)
    return (out, self.bias) if self.return_bias else out


def _linear(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
    bias = self.bias if self.use_bias and not self.return_bias else None
    out = _Linear.apply(inp, self.weight, bias, self.gathers)
    return (out, self.bias) if self.return_bias else out


def _attention(self, query_layer, key_layer, value_layer, attention_mask=None, cu_seqlens_q=None, **_options):
    # Values are a view of the fused projection, keys are not: no layout that cuDNN knows, so all are made contiguous.
    q, k, v = (layer.contiguous() for layer in (query_layer, key_layer, value_layer))
    return _Attention.apply(q, k, v, cu_seqlens_q).flatten(1)
