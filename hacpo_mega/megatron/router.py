"""Which experts a token goes to, and the share of each in what comes of them.

Softmax of float32 logits over all experts, the k largest of them, made to add up to 1 where the family does that; no
loss that would even the load, since no answer earns it. Nothing is drawn: an answer that is scored twice has one score.
As DeepSeek-V3 (arXiv 2412.19437, eq. 13 to 16; GLM-4.5): sigmoids in place of the softmax, and a bias that says which
are the largest and is in no share. Pre-training moved it to even the load; here it stays as it was loaded, to the bit.
Not here: what becomes of a token at its experts (moe.py).
Shapes: n tokens of a rank, k experts of a token, E experts, H hidden size.
"""

import torch
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import FunctionCtx, once_differentiable

from hacpo_mega.models.architecture import Architecture

# Of transformers, so that shares which are all zero stay so.
LEAST = 1e-20


class Router(torch.nn.Module):
    """Which experts a token goes to, and the share of each in what comes of it."""

    def __init__(self, architecture: Architecture, config: TransformerConfig) -> None:
        super().__init__()
        self.architecture = architecture
        self.weight = random_weight(config, architecture.num_experts, architecture.hidden_size)
        # Each tensor rank sees a part of the tokens: the parts of the gradient are added up, as a norm's (norms.py).
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias: torch.nn.Parameter | None = None
        if architecture.kin.experts.shared is not None:
            zeros_E = torch.zeros(architecture.num_experts, device=self.weight.device)
            self.bias = torch.nn.Parameter(zeros_E, requires_grad=False)
        # Rows of (token, expert) pairs that every expert had, over the forwards that were learned from.
        self.load_E = torch.zeros(architecture.num_experts, dtype=torch.int64, device=self.weight.device)
        # Of the pairs that were replayed: those that this router had not chosen, and all.
        self.replayed_2 = torch.zeros(2, dtype=torch.int64, device=self.weight.device)

    def forward(
        self, hidden_nH: torch.Tensor, replayed_nk: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares, float32 [n, k], and the experts that they are of, int64 [n, k], the largest first.

        A token goes to the experts that `replayed_nk` says, in that order, if it says any (not -1): with the shares
        that this router gives them, through which it learns (samples/routing.py).
        """
        logits_nE = _Logits.apply(hidden_nH, self.weight)
        scores_nE = logits_nE.softmax(dim=-1) if self.bias is None else logits_nE.sigmoid()
        experts_nk = chosen_nk = self._largest(scores_nE.detach())
        if replayed_nk is not None:
            is_told_n1 = replayed_nk[:, :1] >= 0
            experts_nk = torch.where(is_told_n1, replayed_nk.long(), chosen_nk)
        shares_nk = scores_nE.gather(1, experts_nk)
        if self.architecture.normalises_experts:
            shares_nk = shares_nk / (shares_nk.sum(dim=-1, keepdim=True) + LEAST)
        if self.architecture.routed_scale != 1.0:
            shares_nk = shares_nk * self.architecture.routed_scale
        if torch.is_grad_enabled():  # once, also where backward computes the layer again
            self.load_E += counts_of(experts_nk, len(self.load_E))
            if replayed_nk is not None:
                is_other_nk = (experts_nk[:, :, None] != chosen_nk[:, None, :]).all(dim=-1)
                self.replayed_2 += torch.stack(
                    [is_other_nk.sum(), is_told_n1.sum() * self.architecture.experts_per_token]
                )
        return shares_nk, experts_nk

    def _largest(self, scores_nE: torch.Tensor) -> torch.Tensor:
        """The experts of every token [n, k]; of the groups whose two largest scores add up to most, where there are
        several."""
        if self.bias is not None:
            scores_nE = scores_nE + self.bias
        if self.architecture.num_groups > 1:
            scores_ngE = scores_nE.unflatten(1, (self.architecture.num_groups, -1))
            of_groups_ng = scores_ngE.topk(2, dim=-1).values.sum(dim=-1)
            best = of_groups_ng.topk(self.architecture.groups_per_token, dim=-1).indices
            is_left_ng = torch.ones_like(of_groups_ng, dtype=torch.bool).scatter(1, best, False)
            scores_nE = scores_ngE.masked_fill(is_left_ng[..., None], -torch.inf).flatten(1)
        return scores_nE.topk(self.architecture.experts_per_token, dim=-1).indices


class _Logits(torch.autograd.Function):
    """float32 logits, which keep their input as it is; of a frozen router, none."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden_nH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_nH if ctx.needs_input_grad[1] else None, weight_EH)
        return hidden_nH.float() @ weight_EH.float().T

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_nE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_nH, weight_EH = ctx.saved_tensors
        grad_hidden = (grad_nE @ weight_EH.float()).type_as(weight_EH)
        return grad_hidden, None if hidden_nH is None else (grad_nE.T @ hidden_nH.float()).type_as(weight_EH)


def random_weight(config: TransformerConfig, rows: int, columns: int) -> torch.nn.Parameter:
    """A matrix as Megatron begins one; it is loaded before it is used."""
    weight = torch.empty(rows, columns, device=torch.cuda.current_device(), dtype=config.params_dtype)
    return torch.nn.Parameter(config.init_method(weight))


def counts_of(experts_nk: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many rows every expert gets [E], of the experts of every token."""
    numbers = experts_nk.flatten()
    return numbers.new_zeros(num_experts).scatter_add_(0, numbers, torch.ones_like(numbers))
