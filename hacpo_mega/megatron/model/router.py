"""Router of a mixture: the experts of each token, and their shares in its output.

Softmax of float32 logits over all experts, the k largest of them, normalised to sum 1 where the family does that.
Routing is deterministic: an answer that is scored twice has one score.
Gemma 4: the router's input is normalised first, its logits are divided by the root of the hidden size, and an expert's
share is finally multiplied by a factor of its own.
DeepSeek-V3 (arXiv 2412.19437, eq. 13 to 16) and GLM-4.5: sigmoids instead of the softmax, and a bias that takes part in
the choice of experts but not in the shares. Pre-training moved it to even the load; here it keeps its loaded bits.
Auxiliary losses of a layer, which agents.megatron switches on (Megatron's names), over the T tokens that a micro-batch
reads, without its padding: f_e of them go to expert e, p_te is the softmax (or the sigmoids, normalised to sum 1):

    moe_aux_loss_coeff   E / (k T^2) sum_e f_e sum_t p_te, 1 where the load is even (arXiv 2101.03961, eq. 4 to 6)
    moe_z_loss_coeff     1 / T sum_t logsumexp(logits_t)^2 (arXiv 2202.08906, eq. 5)

Each is a mean over the tokens of the update, summed over layers. f has no gradient. The first is computed per
micro-batch: it alone depends on how an update is packed.

Elsewhere: the experts (moe.py).

Shapes: n tokens of a rank, k experts of a token, E experts, H hidden size.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import FunctionCtx, once_differentiable

from hacpo_mega.models.families.architecture import Architecture

# As in transformers: shares that are all zero stay zero.
LEAST = 1e-20
# Values in place of a replayed expert's number: the router decides; the token is padding.
UNROUTED, PADDING = -1, -2


class Router(torch.nn.Module):
    """Chooses the experts of each token, and their shares in its output."""

    def __init__(
        self, architecture: Architecture, config: TransformerConfig, norm: Callable[..., torch.nn.Module]
    ) -> None:
        """`norm` makes a norm of the model's, from Megatron's configuration, a size and an epsilon."""
        super().__init__()
        self.architecture = architecture
        self.weight = random_weight(config, architecture.num_experts, architecture.hidden_size)
        # Each tensor rank sees a part of the tokens: the parts of the gradient are added up, as a norm's (layers.py).
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias: torch.nn.Parameter | None = None
        if architecture.traits.experts.correction is not None:
            zeros_E = torch.zeros(architecture.num_experts, device=self.weight.device)
            self.bias = torch.nn.Parameter(zeros_E, requires_grad=False)
        self.logit_bias: torch.nn.Parameter | None = None
        if architecture.traits.experts.biased:
            self.logit_bias = torch.nn.Parameter(torch.zeros_like(self.weight[:, 0]))
            self.logit_bias.sequence_parallel = config.sequence_parallel
        self.norm: torch.nn.Module | None = None
        self.factors: torch.nn.Parameter | None = None
        if architecture.traits.experts.beside:
            self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
            self.factors = torch.nn.Parameter(torch.ones_like(self.weight[:, 0]))
            self.factors.sequence_parallel = config.sequence_parallel
        # Rows of (token, expert) pairs that every expert had, over the forwards that were learned from.
        self.load_E = torch.zeros(architecture.num_experts, dtype=torch.int64, device=self.weight.device)
        # Counts of replayed pairs: those that this router had not chosen, and all.
        self.replayed_2 = torch.zeros(2, dtype=torch.int64, device=self.weight.device)
        self.coefficients = coefficients(config)
        # Tokens of the current update, over all cells; 0: no auxiliary losses.
        self.num_tokens = 0
        # Both losses of this rank's tokens, a sum over tokens, over the forwards that were learned from.
        self.losses_2 = torch.zeros(2, dtype=torch.float64, device=self.weight.device)

    def forward(
        self, hidden_nH: torch.Tensor, replayed_nk: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares, float32 [n, k], and their experts, int64 [n, k], the largest first, of hidden states [n, H].

        A token goes to the experts of `replayed_nk` [n, k], in that order, if it has any (not -1). They get this
        router's shares, through which it learns (samples/routing.py).
        """
        if self.norm is not None:
            logits_nE = _Logits.apply(self.norm(hidden_nH), self.weight) * hidden_nH.shape[-1] ** -0.5
        else:
            logits_nE = _Logits.apply(hidden_nH, self.weight)
        if self.logit_bias is not None:
            logits_nE = logits_nE + self.logit_bias.float()
        scores_nE = logits_nE.softmax(dim=-1) if self.bias is None else logits_nE.sigmoid()
        experts_nk = chosen_nk = self._largest(scores_nE.detach())
        if replayed_nk is not None:
            is_replayed_n1 = replayed_nk[:, :1] >= 0
            experts_nk = torch.where(is_replayed_n1, replayed_nk.long(), chosen_nk)
        shares_nk = scores_nE.gather(1, experts_nk)
        if self.architecture.normalises_experts:
            shares_nk = shares_nk / (shares_nk.sum(dim=-1, keepdim=True) + LEAST)
        if self.architecture.routed_scale != 1.0:
            shares_nk = shares_nk * self.architecture.routed_scale
        if self.factors is not None:
            shares_nk = shares_nk * self.factors.float()[experts_nk]
        if torch.is_grad_enabled():  # once, also where backward computes the layer again
            self.load_E += counts_of(experts_nk, len(self.load_E))
            if replayed_nk is not None:
                is_other_nk = (experts_nk[:, :, None] != chosen_nk[:, None, :]).all(dim=-1)
                self.replayed_2 += torch.stack(
                    [is_other_nk.sum(), is_replayed_n1.sum() * self.architecture.experts_per_token]
                )
            if self.num_tokens:
                is_read_n = torch.ones_like(experts_nk[:, 0]) if replayed_nk is None else replayed_nk[:, 0] != PADDING
                shares_nk = _AddLoss.apply(shares_nk, self._loss(logits_nE, scores_nE, experts_nk, is_read_n.float()))
        return shares_nk, experts_nk

    def _loss(
        self, logits_nE: torch.Tensor, scores_nE: torch.Tensor, experts_nk: torch.Tensor, is_read_n: torch.Tensor
    ) -> torch.Tensor:
        """This rank's part of the auxiliary losses of the micro-batch. Collective over the ranks that share it."""
        for_balance, for_logits = self.coefficients
        balance = logits = logits_nE.new_zeros(())
        if for_balance:
            probs_nE = scores_nE
            if self.bias is not None:
                probs_nE = scores_nE / (scores_nE.sum(dim=-1, keepdim=True) + LEAST)
            weights_nk = is_read_n[:, None].expand(experts_nk.shape)
            counts_E = torch.zeros_like(probs_nE[0]).index_add_(0, experts_nk.flatten(), weights_nk.flatten())
            group = parallel_state.get_tensor_and_context_parallel_group()
            if group.size() > 1:
                dist.all_reduce(counts_E, group=group)
            # The sum over pairs is k T; it is 0 for a micro-batch of padding alone.
            per_pair_E = counts_E * self.architecture.num_experts / counts_E.sum().clamp(min=1)
            balance = ((probs_nE * is_read_n[:, None]).sum(dim=0) * per_pair_E).sum()
        if for_logits:
            logits = (logits_nE.logsumexp(dim=-1).square() * is_read_n).sum()
        self.losses_2 += torch.stack([balance.detach(), logits.detach()])
        return (for_balance * balance + for_logits * logits) / self.num_tokens

    def _largest(self, scores_nE: torch.Tensor) -> torch.Tensor:
        """Experts of every token [n, k], from scores [n, E].

        With several groups of experts, only from the groups whose two largest scores have the largest sums.
        """
        if self.bias is not None:
            scores_nE = scores_nE + self.bias
        if self.architecture.num_groups > 1:
            scores_ngE = scores_nE.unflatten(1, (self.architecture.num_groups, -1))
            of_groups_ng = scores_ngE.topk(2, dim=-1).values.sum(dim=-1)
            best = of_groups_ng.topk(self.architecture.groups_per_token, dim=-1).indices
            is_left_ng = torch.ones_like(of_groups_ng, dtype=torch.bool).scatter(1, best, False)
            scores_nE = scores_ngE.masked_fill(is_left_ng[..., None], -torch.inf).flatten(1)
        return scores_nE.topk(self.architecture.experts_per_token, dim=-1).indices


def coefficients(config: TransformerConfig) -> tuple[float, float]:
    """Coefficients of a layer's moe_aux_loss and moe_z_loss."""
    return config.moe_aux_loss_coeff, config.moe_z_loss_coeff or 0.0


class _AddLoss(torch.autograd.Function):
    """Passes the shares [n, k] through; backward adds the gradient of a loss outside of the micro-batch's own."""

    @staticmethod
    def forward(ctx: FunctionCtx, shares_nk: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype = loss.dtype
        return shares_nk.view_as(shares_nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_nk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad_nk, torch.ones((), dtype=ctx.dtype, device=grad_nk.device)  # the law of train/schedule.py: no scale


class _Logits(torch.autograd.Function):
    """float32 logits [n, E]; keeps the input in its own dtype, and nothing for a frozen router."""

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
    """A weight with Megatron's initialisation; it is loaded before it is used."""
    weight = torch.empty(rows, columns, device=torch.cuda.current_device(), dtype=config.params_dtype)
    return torch.nn.Parameter(config.init_method(weight))


def counts_of(experts_nk: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Number of rows per expert [E], from the experts of every token [n, k]."""
    numbers = experts_nk.flatten()
    return numbers.new_zeros(num_experts).scatter_add_(0, numbers, torch.ones_like(numbers))
