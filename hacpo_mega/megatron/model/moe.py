"""Mixture-of-experts layer: a router and experts in place of a feed-forward, each expert whole on one rank of ep.

Megatron's own layer is not used (core 0.19.2): without TransformerEngine its float32 router does not run, its
dispatcher needs CUDA streams, its grouped experts a package that no lock has. This one does the same in fewer steps:

    router      the k experts of a token, and their shares in its output (router.py)
    dispatch    an all-to-all sends the rows of this rank's tokens, sorted by expert, to the ranks with the experts
    experts     down(act(gate x) * up x), for all rows of an expert together
    combine     rows come back, and a token's are summed by its shares, in float32
    shared      a feed-forward for all tokens, where the family has one: split over tp, as every other is; some
                multiply its output with the sigmoid of a number per token, its gate; Gemma 4 has norms before and
                after it, and before and after the experts

Each rank of tp (sequence parallelism) and cp brings its own tokens. So a rank adds to the router's gradient the
part of its own tokens, as with a norm, and to an expert's gradient the part of all rows it was sent.
No token is dropped, there is no padding and no randomness, and no number depends on whether gradients are kept: an
answer that is scored twice has one score. The permutations are gathers in forward and in backward, so the bits repeat
on CUDA.

Elsewhere: which ranks share experts (actor.py), where weights come from (models/sharding/segments.py).

Shapes: n tokens of a rank, k experts of a token, E experts, e = E / ep of them on this rank, R rows that it computes, H
hidden size, F width of an expert.
"""

from copy import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hacpo_kernels import add_grouped_product, add_product, combine_gradients, combine_rows
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, all_to_all
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch.autograd.function import FunctionCtx, once_differentiable

from hacpo_mega.megatron.model.attention import as_part
from hacpo_mega.megatron.model.linear import GatedActivation
from hacpo_mega.megatron.model.router import Router, counts_of, random_weight
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.experts import BESIDE_NORMS

# torch's grouped product reads rows of 16 bytes.
ALIGNED = 8


class ExpertLayer(torch.nn.Module):
    """Experts of a layer and their router, as Megatron builds and calls a feed-forward."""

    architecture: Architecture  # `expert_layer` sets it and the model's norm
    norm_type: type[torch.nn.Module]
    place: int  # index among the layers of its stage (model.py)

    def __init__(self, config: TransformerConfig, **_place: object) -> None:
        super().__init__()
        self.group = parallel_state.get_expert_model_parallel_group()
        self.router = Router(self.architecture, config, self.norm_type)
        self.experts = Experts(self.architecture, config, self.architecture.num_experts // self.group.size())
        self.shared = _shared_experts(self.architecture, config) if self.architecture.shared_ffn else None
        self.shared_gate: torch.nn.Linear | None = None
        if self.architecture.traits.experts.shared_gate is not None:
            place = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
            self.shared_gate = torch.nn.Linear(config.hidden_size, 1, bias=False, **place)
            self.shared_gate.weight.sequence_parallel = config.sequence_parallel  # as the router's

    def forward(self, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """[n, 1, H] -> the same shape, and no bias.

        `padding_mask` is the one per-token argument that Megatron passes to a router, also where backward computes it
        again. Here it carries the replayed experts, int16 [n, layers of the stage, k], -1 where the router decides;
        None: it always does.
        """
        output = self._routed(hidden, hidden, padding_mask)
        if self.shared is None:
            return output, None
        shared = self.shared(hidden)[0]
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(hidden).sigmoid()
        return output + shared, None

    def _routed(self, hidden: torch.Tensor, read: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
        """The experts' output for `hidden`, [n, 1, H] both, by a router that reads `read`, of the same shape."""
        hidden_nH, replayed_nk = hidden.flatten(0, -2), None if padding_mask is None else padding_mask[:, self.place]
        shares_nk, experts_nk = self.router(read.flatten(0, -2), replayed_nk)
        order, counts_E = by_expert(experts_nk, self.architecture.num_experts)
        rows_RH = _Spread.apply(hidden_nH, order, experts_nk.shape[1])
        if self.group.size() == 1:
            rows_RH = self.experts(rows_RH, counts_E)
        else:
            exchange = ExpertDispatch.of(counts_E, len(order), self.group)
            rows_RH = exchange.combine(self.experts(exchange.dispatch(rows_RH), exchange.counts_e))
        return _Combine.apply(rows_RH, order, shares_nk).view_as(hidden)


class ExpertsBeside(ExpertLayer):
    """Experts beside the layer's feed-forward, which is `shared` here, both between norms of their own (Gemma 4)."""

    def __init__(self, config: TransformerConfig, **place: object) -> None:
        super().__init__(config, **place)
        for name in BESIDE_NORMS:
            self.add_module(name, self.norm_type(config, config.hidden_size, config.layernorm_epsilon))

    def forward(self, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """`ExpertLayer.forward` of the residual [n, 1, H], before any norm."""
        shared = self.shared_output_norm(self.shared(self.shared_norm(hidden))[0])
        return shared + self.output_norm(self._routed(self.norm(hidden), hidden, padding_mask)), None


def expert_layer(architecture: Architecture, norm: type[torch.nn.Module]) -> type[ExpertLayer]:
    """Makes the layer's class for an architecture and its `norm`; a spec with arguments would make Megatron warn for
    every layer."""
    kind = ExpertsBeside if architecture.traits.experts.beside else ExpertLayer
    return type(kind.__name__, (kind,), {"architecture": architecture, "norm_type": norm})


def _shared_experts(architecture: Architecture, config: TransformerConfig) -> MLP:
    """Megatron's feed-forward, which takes its width from its configuration."""
    config = copy(config)
    config.ffn_hidden_size = architecture.shared_ffn
    activation = ModuleSpec(module=GatedActivation, params={"name": architecture.traits.activation})
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=activation)
    group = parallel_state.get_tensor_model_parallel_group()
    return MLP(config, parts, ffn_hidden_size=architecture.shared_ffn, tp_group=group)


class Experts(torch.nn.Module):
    """Experts of this rank."""

    def __init__(self, architecture: Architecture, config: TransformerConfig, num_experts: int) -> None:
        super().__init__()
        hidden, width = architecture.hidden_size, architecture.expert_ffn
        self.activation = GatedActivation(architecture.traits.activation)
        biased = architecture.traits.experts.biased
        self.gate_up = ExpertMatrix(config, num_experts, 2 * width, hidden, biased=biased)
        self.down = ExpertMatrix(config, num_experts, hidden, width, biased=biased)

    def forward(self, rows_RH: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        """Rows [R, H] sorted by expert, and their number per expert [e] -> output rows [R, H]."""
        return self.down(self.activation(self.gate_up(rows_RH, counts_e)), counts_e)


class ExpertMatrix(torch.nn.Module):
    """One matrix of every expert of this rank, and its bias, stacked along the rows (segments.py, Cut.EXPERTS)."""

    def __init__(self, config: TransformerConfig, num_experts: int, rows: int, columns: int, *, biased: bool) -> None:
        super().__init__()
        self.weight = as_experts(random_weight(config, num_experts * rows, columns))
        self.bias = as_experts(torch.nn.Parameter(torch.zeros_like(self.weight[:, 0]))) if biased else None

    def forward(self, rows_RK: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        """Every row [R, K] times the matrix of its expert, [R, N]; rows are sorted by expert, counts [e]."""
        product_RN = expert_product(rows_RK, self.weight, counts_e)
        return product_RN if self.bias is None else _AddBias.apply(product_RN, self.bias, counts_e)


class _AddBias(torch.autograd.Function):
    """Adds to every row the bias of its expert, in place; the gradient is a sum over an expert's rows in float32."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_RN: torch.Tensor, bias_M: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts_e)
        ctx.mark_dirty(rows_RN)
        bias_eN = bias_M.unflatten(0, (len(counts_e), -1))
        return rows_RN.add_(bias_eN.repeat_interleave(counts_e, dim=0, output_size=len(rows_RN)))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return grad_RN, None, None
        (counts_e,) = ctx.saved_tensors
        numbers_RN = grad_RN.to(torch.promote_types(grad_RN.dtype, torch.float32))
        sums_eN = torch.segment_reduce(numbers_RN, "sum", lengths=counts_e, unsafe=True, initial=0)
        return grad_RN, sums_eN.flatten().type_as(grad_RN), None


def as_experts(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """Marks a parameter as expert weights of this rank for Megatron."""
    weight.allreduce = False  # Megatron's mark of expert weights: buffers and an optimizer of their own
    return as_part(weight)


# ---- rows


def by_expert(experts_nk: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order [n k] that sorts (token, expert) pairs by expert, and the number of rows per expert [E]."""
    return experts_nk.flatten().argsort(stable=True), counts_of(experts_nk, num_experts)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Spread(torch.autograd.Function):
    """Permute: a token's row for each of its experts, sorted by expert: [n, H] -> [n k, H]."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden_nH: torch.Tensor, order: torch.Tensor, per_token: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.per_token = per_token
        return hidden_nH.index_select(0, order // per_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_RH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return combine_rows(grad_RH, _inverse(order).view(-1, ctx.per_token)), None, None


class _Combine(torch.autograd.Function):
    """Unpermute: a token's rows weighted by their shares, summed in float32: [n k, H] -> [n, H]."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_RH: torch.Tensor, order: torch.Tensor, shares_nk: torch.Tensor) -> torch.Tensor:
        place_nk = _inverse(order).view_as(shares_nk)
        ctx.save_for_backward(rows_RH, place_nk, shares_nk)
        return combine_rows(rows_RH, place_nk, shares_nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_nH: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        grad_RH, grad_shares_nk = combine_gradients(grad_nH, *ctx.saved_tensors)
        return grad_RH, None, grad_shares_nk


# ---- over the ranks of ep


@dataclass(frozen=True)
class ExpertDispatch:
    """All-to-all token dispatch and combine over the expert-parallel group.

    sent, received   number of rows that go to each rank of ep, and come from it
    order            sorts the received rows, which are sorted by rank, by expert: [R]
    counts_e         number of rows of each expert of this rank
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    order: torch.Tensor
    counts_e: torch.Tensor

    @classmethod
    def of(cls, counts_E: torch.Tensor, num_rows: int, group: dist.ProcessGroup) -> "ExpertDispatch":
        """Plans the exchange of `num_rows` rows, `counts_E` [E] of them per expert. Collective over `group`."""
        to_re = counts_E.view(group.size(), -1)
        from_re = torch.empty_like(to_re)
        dist.all_to_all_single(from_re, to_re.contiguous(), group=group)
        sent, received = _on_host(torch.stack([to_re.sum(dim=1), from_re.sum(dim=1)]), num_rows)
        experts_e = torch.arange(from_re.shape[1], device=from_re.device).repeat(group.size())
        labels_R = experts_e.repeat_interleave(from_re.flatten(), output_size=sum(received))
        return cls(group, sent, received, labels_R.argsort(stable=True), from_re.sum(dim=0))

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends this rank's rows [n k, H]; returns the rows of this rank's experts, sorted by expert [R, H]."""
        return _Permute.apply(all_to_all(self.group, rows, self.received, self.sent), self.order)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends results [R, H] back; returns this rank's, in their original order [n k, H]."""
        return all_to_all(self.group, _Permute.apply(rows, _inverse(self.order)), self.sent, self.received)


def _on_host(counts: torch.Tensor, _num_rows: int) -> list[list[int]]:
    """Counts as Python numbers: waits for the device.

    A memory trace, which has no numbers, replaces this function by one that spreads `_num_rows` evenly in each line.
    """
    return counts.tolist()


class _Permute(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, _inverse(ctx.saved_tensors[0])), None


# ---- products


def expert_product(rows_RK: torch.Tensor, weight_MK: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """Every row [R, K] times the matrix [N, K] of its expert, [R, N]; rows are sorted by expert, counts [e].

    The matrices are stacked, [M = e N, K]. Their gradient is added to the float32 sum of Megatron's buffer if they have
    one, as linear.py does for others.
    """
    product = grouped_product if _fits(rows_RK, weight_MK, len(counts_e)) else looped_product
    return product(rows_RK, weight_MK, counts_e)


def _fits(rows_RK: torch.Tensor, weight_MK: torch.Tensor, num_experts: int) -> bool:
    """True if torch's grouped product supports these matrices: bfloat16 on CUDA, in rows of 16 bytes."""
    aligned = not (weight_MK.shape[0] // num_experts % ALIGNED or weight_MK.shape[1] % ALIGNED)
    return rows_RK.is_cuda and rows_RK.dtype is torch.bfloat16 and aligned


def looped_product(rows_RK: torch.Tensor, weight_MK: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """`expert_product` with one product per expert. Waits for the device."""
    (counts,) = _on_host(counts_e[None], len(rows_RK))
    return _Looped.apply(rows_RK, weight_MK, counts)


class _Looped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RK: torch.Tensor, weight_MK: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(_for_weight(ctx, rows_RK), weight_MK)
        ctx.counts = counts
        weight_eNK = weight_MK.unflatten(0, (len(counts), -1))
        output_RN = rows_RK.new_empty(len(rows_RK), weight_eNK.shape[1])
        for rows, weight_NK, output in zip(rows_RK.split(counts), weight_eNK, output_RN.split(counts), strict=True):
            torch.mm(rows, weight_NK.T, out=output)
        return output_RN

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (rows_RK, weight_MK), grads = ctx.saved_tensors, grad_RN.split(ctx.counts)
        weight_eNK = weight_MK.unflatten(0, (len(ctx.counts), -1))
        grad_rows = grad_RN.new_empty(len(grad_RN), weight_eNK.shape[2])
        for grad, weight_NK, into_rows in zip(grads, weight_eNK, grad_rows.split(ctx.counts), strict=True):
            torch.mm(grad, weight_NK, out=into_rows)
        if rows_RK is None:
            return grad_rows, None, None
        total_eNK = _gradient_sum(weight_MK).view_as(weight_eNK)
        for grad, rows, total_NK in zip(grads, rows_RK.split(ctx.counts), total_eNK, strict=True):
            if len(rows):
                add_product(total_NK, grad.T, rows)
        return grad_rows, _for_autograd(weight_MK, total_eNK), None


def _for_weight(ctx: FunctionCtx, rows_RK: torch.Tensor) -> torch.Tensor | None:
    """Rows [R, K] that the gradient of the matrices needs; None if these are frozen."""
    return rows_RK if ctx.needs_input_grad[1] else None


def _gradient_sum(weight_MK: torch.Tensor) -> torch.Tensor:
    """Sum [M, K] that the gradient is added to: that of the update, or zeros for a weight outside of a buffer."""
    total_MK = getattr(weight_MK, "main_grad", None)
    dtype = torch.promote_types(weight_MK.dtype, torch.float32)
    return torch.zeros_like(weight_MK, dtype=dtype) if total_MK is None else total_MK


def _for_autograd(weight_MK: torch.Tensor, total_eNK: torch.Tensor) -> torch.Tensor:
    """Gradient [M, K] for autograd; a placeholder that Megatron's hook ignores where the update's sum has it."""
    if getattr(weight_MK, "main_grad", None) is None:
        return total_eNK.flatten(0, 1).type_as(weight_MK)
    weight_MK.grad_added_to_main_grad = True
    return torch.empty_like(weight_MK)


def grouped_product(rows_RK: torch.Tensor, weight_MK: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """`expert_product` as one kernel."""
    return _Grouped.apply(rows_RK, weight_MK, counts_e.cumsum(0).to(torch.int32))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RK: torch.Tensor, weight_MK: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(_for_weight(ctx, rows_RK), weight_MK, ends_e)
        weight_eNK = weight_MK.unflatten(0, (len(ends_e), -1))
        if not len(rows_RK):
            return rows_RK.new_empty(0, weight_eNK.shape[1])
        return torch._grouped_mm(rows_RK, weight_eNK.transpose(1, 2), offs=ends_e)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        rows_RK, weight_MK, ends_e = ctx.saved_tensors
        weight_eNK, grad_RN = weight_MK.unflatten(0, (len(ends_e), -1)), grad_RN.contiguous()
        grad_rows = grad_RN.new_empty(len(grad_RN), weight_eNK.shape[2])
        if len(grad_RN):
            grad_rows = torch._grouped_mm(grad_RN, weight_eNK, offs=ends_e)
        if rows_RK is None:
            return grad_rows, None, None
        # torch's own kernel rounds to bf16, and on Blackwell leaves the memory of an expert without rows as it was.
        total_eNK = _gradient_sum(weight_MK).view_as(weight_eNK)
        add_grouped_product(total_eNK, grad_RN, rows_RK, ends_e)
        return grad_rows, _for_autograd(weight_MK, total_eNK), None
