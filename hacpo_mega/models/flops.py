"""Model FLOPs: those that the mathematics of a decoder needs, not those that a device happens to execute.

As in Megatron-LM's and PaLM's accounting (arXiv 2104.04473 eq. 3, 2204.02311 appendix B), a multiplication and an
addition count as two; norms, rotary positions and softmax are left out; recomputed activations do not count. A
layer's experts count only if a token goes to them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.lora import Lora, adapter_slots
from hacpo_mega.models.sharding.segments import Cut

# TFLOP/s of bf16 and fp16 without sparsity by the name that CUDA gives a device, from NVIDIA's data sheets. A part of a
# device (MIG) has another name.
PEAK_TFLOPS: Mapping[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A800-SXM4-80GB": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H20": 148.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H800": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
}


def matrix_parameters(model: Architecture) -> int:
    """Parameters that every token is multiplied with: all matrices but the embedding table, and the output head."""
    if model.latent is not None:
        attention = model.attention_layers * _latent_parameters(model)
    else:
        attention = 0
        for heads in model.attention_heads:
            query, key_value = model.num_heads * heads.size, heads.kv_heads * heads.size * (1 + heads.has_values)
            attention += model.hidden_size * (query * (3 if model.gated else 2) + key_value)  # query, output, gate
    if (delta := model.delta_net) is not None:
        each = model.hidden_size * (delta.projected_rows + delta.value_rows) + delta.mixed_rows * delta.width
        attention += (model.num_layers - model.attention_layers) * each + _states(model)
    return attention + feed_forward_parameters(model) + model.hidden_size * model.vocab_size


def _states(model: Architecture) -> int:
    """Numbers of delta nets' states that a token is multiplied with: each is read twice and written once."""
    delta = model.delta_net
    return 0 if delta is None else 3 * (model.num_layers - model.attention_layers) * delta.state


def _latent_parameters(model: Architecture) -> int:
    """`matrix_parameters` of the latent attention of one layer, its output matrix included."""
    latent, query = model.latent, model.num_heads * model.head_dim
    of_tokens = latent.query_rank + latent.cached + model.num_heads * latent.value_dim
    of_latents = latent.rank * model.num_heads * (latent.nope_dim + latent.value_dim)
    return model.hidden_size * of_tokens + of_latents + (latent.query_rank or model.hidden_size) * query


def pair_numbers(model: Architecture) -> int:
    """Multiplications per pair of tokens in attention: sizes of queries and of values, over all heads and layers."""
    if model.latent is not None:
        return model.attention_layers * model.num_heads * (model.head_dim + model.value_dim)
    return 2 * model.num_heads * sum(heads.size for heads in model.attention_heads)


def pairs_per_token(model: Architecture) -> int:
    """Pairs of tokens whose attention takes as many FLOPs as a token's matrices."""
    return matrix_parameters(model) // (pair_numbers(model) or 2 * model.num_heads * model.head_dim)


def feed_forward_parameters(model: Architecture) -> int:
    """`matrix_parameters` of all feed-forwards: routers, the experts of a token, and shared experts."""
    columns = (model.num_layers - model.expert_layers) * model.ffn_size + model.expert_layers * model.shared_ffn
    routers = model.expert_layers * (model.num_experts + model.gates_shared)
    return active_experts(model) + model.hidden_size * (3 * columns + routers)


def active_experts(model: Architecture) -> int:
    """Parameters of a token's experts in all layers, without shared experts."""
    return 3 * model.expert_layers * model.experts_per_token * model.hidden_size * model.expert_ffn


def touched_experts(model: Architecture, tokens: float) -> float:
    """Share of a layer's experts that receive any of so many tokens, if each token chooses at random."""
    return 1.0 - (1.0 - model.experts_per_token / model.num_experts) ** tokens


def learning_flops(model: Architecture, num_sequences: float, length: float, lora: Lora | None = None) -> float:
    """FLOPs of a forward and a backward pass: backward costs two forwards, one for a matrix's input and one for itself.

    With adapters the matrices themselves have no gradient, and the cost of the factors comes on top; states of delta
    nets are no matrices.
    """
    forward = forward_flops(model, num_sequences, length)
    if lora is None:
        return 3.0 * forward
    attention = forward - num_sequences * 2.0 * (matrix_parameters(model) - _states(model)) * length
    adapters = num_sequences * 2.0 * _active_adapters(model, lora) * length
    return 2.0 * forward + attention + 3.0 * adapters


def shared_learning_flops(
    model: Architecture, groups: Iterable[tuple[int, Sequence[int]]], lora: Lora | None = None
) -> float:
    """`learning_flops` of answers that share the reading of their prompts: (tokens of a prompt, of each answer)."""
    total = 0.0
    for prompt, answers in groups:
        before = learning_flops(model, 1.0, prompt, lora)
        total += before + sum(learning_flops(model, 1.0, prompt + answer, lora) - before for answer in answers)
    return total


def _active_adapters(model: Architecture, lora: Lora) -> float:
    """Adapter parameters that a token is multiplied with; of experts, those it is routed to."""
    slots = adapter_slots(model, (model.num_layers,), 1, 0, lora)
    sizes = [(slot.cut is Cut.EXPERTS, math.prod(source.shape)) for slot in slots for source in slot.sources]
    experts = sum(size for is_expert, size in sizes if is_expert)
    share = model.experts_per_token / max(1, model.num_experts)
    return sum(size for _, size in sizes) - (1.0 - share) * experts


def forward_flops(model: Architecture, num_sequences: float, length: float) -> float:
    """FLOPs of one forward pass over `num_sequences` sequences of `length` tokens each.

    2 per matrix parameter and token; causal attention adds, per layer, 2 for q.k and 2 for the values, per head
    dimension and pair of tokens, of which there are length^2 / 2.
    """
    attention = 1.0 * pair_numbers(model) * length**2
    return num_sequences * (2.0 * matrix_parameters(model) * length + attention)
