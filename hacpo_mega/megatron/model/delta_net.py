"""Gated delta net over packed sequences, in the place of attention (Gated DeltaNet, arXiv 2412.06464).

Every head has a state S [D, E], zero where a sequence begins. Token t brings a query and a key of length 1, a value, a
decay a_t in (0, 1) and a share b_t in (0, 1):

    S_t = a_t S_{t-1} + k_t b_t (v_t - a_t S_{t-1}^T k_t)^T        o_t = S_t^T q_t / sqrt(D)

Queries, keys and values come out of a causal convolution over the last tokens of their sequence. Outputs are
normalised over a head and gated. `delta_rule` works on chunks of tokens as the paper has it; engines go token by token
(rollout/cpu/delta_net.py). On CUDA flash-linear-attention's kernel is used where it is installed. Backward computes all
of this again from the projection alone.

Tensor ranks share the heads. Not supported: context parallelism and shared prompts, which need whole sequences
(models/sharding/layout.py, actor.py). Names of weights: models/sharding/segments.py.

Shapes: T tokens in S segments, M chunks of C tokens, N heads of values of this rank, D key and E value numbers of a
head, R rows of the projection.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import rms_norm, silu, softplus
from torch.utils.checkpoint import checkpoint

from hacpo_mega.cluster.machine.device import send
from hacpo_mega.megatron.model.attention import as_part
from hacpo_mega.megatron.model.installed import DELTA_RULE
from hacpo_mega.megatron.model.shared_prompts import PackedSegments
from hacpo_mega.models.families.delta_net import DeltaNet

CHUNK = 64
EPSILON = 1e-6  # of the lengths of queries and keys, as flash-linear-attention has it


class GatedDeltaNet(torch.nn.Module):
    """Gated delta net of a layer, as Megatron builds and calls an attention."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        delta: DeltaNet,
        layer_number: int,
        **_place: object,
    ) -> None:
        super().__init__()
        self.delta, self.eps, tp = delta, config.layernorm_epsilon, pg_collection.tp.size()
        how = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, delta.projected_rows, gather_output=False, tp_group=pg_collection.tp, **how
        )
        self.conv1d = Weight(config, delta.mixed_rows // tp, 1, delta.width)
        self.dt_bias = as_part(Weight(config, delta.value_heads // tp).weight)
        self.A_log = as_part(Weight(config, delta.value_heads // tp).weight)
        self.norm = Weight(config, delta.value_dim)
        self.norm.weight.sequence_parallel = config.sequence_parallel  # a copy, whose gradient is from own heads
        self.out_proj = RowParallelLinear(
            delta.value_rows,
            config.hidden_size,
            input_is_parallel=True,
            tp_group=pg_collection.tp,
            **how,
        )
        self.sizes = [rows // tp for rows in (delta.mixed_rows, delta.value_rows, *[delta.value_heads] * 2)]

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, packed_seq_params: PackedSegments, **_how: object
    ) -> tuple[torch.Tensor, None]:
        """[t/tp, 1, H] -> the same shape, and no bias."""
        projected_TR = self.in_proj(hidden_states)[0].squeeze(1)
        output = checkpoint(self._mix, projected_TR, packed_seq_params, use_reentrant=False, preserve_rng_state=False)
        return self.out_proj(output[:, None])[0], None

    def _mix(self, projected_TR: torch.Tensor, packed: PackedSegments) -> torch.Tensor:
        """Gated outputs of this rank's heads [T, N * E] from their projection."""
        delta = self.delta
        mixed, gate, share_TN, decay_TN = projected_TR.split(self.sizes, dim=1)
        mixed = silu(causal_convolution(mixed, self.conv1d.weight, packed))
        keys = self.sizes[0] - self.sizes[1]
        query, key, value = mixed.split([keys // 2, keys // 2, self.sizes[1]], dim=1)
        repeated = (
            rows.unflatten(1, (-1, delta.key_dim)).repeat_interleave(delta.value_heads // delta.key_heads, dim=1)
            for rows in (query, key)
        )
        value_TNE = value.unflatten(1, (-1, delta.value_dim))
        log_decay_TN = -self.A_log.float().exp() * softplus(decay_TN.float() + self.dt_bias.float())
        # flash-linear-attention's asserts half precision.
        can_fuse = value.is_cuda and DELTA_RULE is not None and value.dtype != torch.float32
        rule = fused_rule if can_fuse else delta_rule
        output_TNE = rule(DeltaInputs(*repeated, value_TNE, log_decay_TN, share_TN.float().sigmoid()), packed)
        normed = rms_norm(output_TNE.float(), (delta.value_dim,), self.norm.weight.float(), self.eps)
        gated = normed * silu(gate.unflatten(1, (-1, delta.value_dim)).float())
        return gated.type_as(projected_TR).flatten(1)


class Weight(torch.nn.Module):
    """Parameter `weight` of a submodule; a copy on every tensor rank if it is a vector, else this rank's part."""

    def __init__(self, config: TransformerConfig, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.ones(*shape, device=torch.cuda.current_device(), dtype=config.params_dtype)
        )
        if len(shape) > 1:
            as_part(self.weight)


def causal_convolution(rows_TR: torch.Tensor, weight_R1W: torch.Tensor, packed: PackedSegments) -> torch.Tensor:
    """Every row [T, R] times its own weights over the last W tokens of its segment, the token itself last."""
    counting_T = torch.arange(len(rows_TR), device=rows_TR.device)
    first_T = packed.starts[torch.searchsorted(packed.starts, counting_T, right=True) - 1]
    weight_WR = weight_R1W.flatten(1).T
    output = rows_TR * weight_WR[-1]
    for back in range(1, len(weight_WR)):
        before = rows_TR.roll(back, 0) * (counting_T - back >= first_T)[:, None]
        output = output + before * weight_WR[-1 - back]
    return output


class DeltaInputs(NamedTuple):
    """Queries, keys and values of every token and head, the logarithms of decays, and shares."""

    query_TND: torch.Tensor
    key_TND: torch.Tensor
    value_TNE: torch.Tensor
    log_decay_TN: torch.Tensor
    share_TN: torch.Tensor


def fused_rule(inputs: DeltaInputs, packed: PackedSegments) -> torch.Tensor:
    """`delta_rule` by flash-linear-attention's kernel."""
    tensors = (tensor[None].contiguous() for tensor in inputs)
    # It keeps the chunks of the last tensor of starts: for another one, equal or not, it waits for the device.
    output, _ = DELTA_RULE(*tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=packed.starts)
    return output[0]


def delta_rule(inputs: DeltaInputs, packed: PackedSegments) -> torch.Tensor:
    """Outputs [T, N, E] of the rule in every segment, in chunks: within a chunk by matrices, then chunk after chunk.

    With c_i the decays of a chunk multiplied up to token i, G_ij = c_i / c_j for i >= j, and S the state before it, the
    rows U of new values solve (1 + strict(b K K^T * G)) U = b (V - c K S), and O = c Q S + (Q K^T * G) U.
    Computes in float32.
    """
    places_MC, order_T, counts = chunk_places(packed.lengths, inputs.value_TNE.device)

    def chunks(tensor: torch.Tensor) -> torch.Tensor:
        """[T, N, ...] as [M, N, C, ...], in float32, zero behind the end of a segment."""
        padded = torch.cat([tensor.float(), tensor.new_zeros(1, *tensor.shape[1:], dtype=torch.float32)])
        return padded[places_MC].transpose(1, 2)

    query, key, value, decay, share = map(chunks, inputs._replace(key_TND=unit(inputs.key_TND)))
    query = unit(query) * query.shape[-1] ** -0.5
    above = decay.cumsum(-1)
    ratio = (above[..., :, None] - above[..., None, :]).tril().exp().tril()
    shared, grown = key * share[..., None], above.exp()[..., None]
    system = (shared @ key.mT * ratio).tril(-1)
    both = torch.cat([value * share[..., None], shared * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new, met = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    within, query = query @ key.mT * ratio, query * grown
    key, left = key * (above[..., -1:] - above).exp()[..., None], grown[..., -1:, :]
    outputs, state, first = [], None, 0
    for count in counts:
        now = slice(first, first + count)
        if state is None:
            values = new[now]
            outputs.append(within[now] @ values)
            state = key[now].mT @ values
        else:
            state = state[:count]
            values = new[now] - met[now] @ state
            outputs.append(query[now] @ state + within[now] @ values)
            state = state * left[now] + key[now].mT @ values
        first += count
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[order_T].type_as(inputs.value_TNE)


def chunk_places(lengths: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Tokens of every chunk [M, C], T where it has none; places of all tokens among them [T]; numbers of segments with
    a first chunk, with a second, and so on.

    All first chunks come first, those of longer segments before others, then all second ones: every round has the
    first segments of the round before.
    """
    size = min(CHUNK, max(lengths))
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    rounds = -(-max(lengths) // size)
    inside = [[n for n in order if lengths[n] > turn * size] for turn in range(rounds)]
    begins = [starts[n] + turn * size for turn, of in enumerate(inside) for n in of]
    sizes = [min(size, lengths[n] - turn * size) for turn, of in enumerate(inside) for n in of]
    rows = sorted(range(len(begins)), key=lambda row: begins[row])  # chunks as they lie in the pack
    numbers = begins, sizes, [row * size - begins[row] for row in rows], [sizes[row] for row in rows]
    begins_M, sizes_M, shifts_M, in_order_M = send([torch.tensor(of_M) for of_M in numbers], device)
    counting, tokens = torch.arange(size, device=device), torch.arange(sum(lengths), device=device)
    places_MC = (begins_M[:, None] + counting).where(counting < sizes_M[:, None], sum(lengths))
    order_T = tokens + shifts_M.repeat_interleave(in_order_M, output_size=len(tokens))
    return places_MC, order_T, [len(of) for of in inside]


def unit(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] of length 1, in float32 at least."""
    numbers = rows.float() if rows.dtype.itemsize < 4 else rows
    return numbers * torch.rsqrt(numbers.square().sum(-1, keepdim=True) + EPSILON)
