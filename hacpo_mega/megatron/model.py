"""A Hugging Face architecture as a Megatron model whose last stage answers hidden states, not logits.

The language-model head is a fused kernel outside (hacpo_kernels.linear_logprob), so no [T, V] tensor ever exists here.
Shapes: T tokens of a packed micro-batch, H hidden size, V vocabulary (V/tp on a rank), D head size.
Not here: where weights come from and go (names.py, reshard.py), and how a model trains (actor.py).
"""

import dataclasses
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch.nn.functional import silu

from hacpo_mega.megatron.layers import decoder_spec
from hacpo_mega.megatron.platform import megatron_platform
from hacpo_mega.models.architecture import Architecture, Llama3Rope

# Megatron's habit, for matrix shapes that GPUs like: a rank's share of the vocabulary is a multiple of this.
VOCAB_MULTIPLE = 128

# Fields of TransformerConfig that give pipeline stages different numbers of layers.
UNEVEN_STAGES = frozenset(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"))


class HiddenStateModel(GPTModel):
    """GPTModel over packed sequences: rotary angles from explicit positions, hidden states instead of logits."""

    def __init__(self, architecture: Architecture, **options: Any) -> None:
        super().__init__(position_embedding_type="none", **options)
        self.architecture = architecture
        # Not a buffer: a wrapper that casts the model to half precision must leave the angles alone.
        self.rope_D2 = rope_frequencies(architecture).to(torch.cuda.current_device())

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, decoder_input: None = None, **_unused: Any
    ) -> tuple:
        """Embeddings (first stage only) and rotary angles [T, 1, 1, D] of the given positions."""
        hidden = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        angles = torch.outer(position_ids[0].float(), self.rope_D2)
        return hidden, torch.cat((angles, angles), dim=-1)[:, None, None, :], None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, **_unused: Any) -> torch.Tensor:
        """Between stages [T/tp, 1, H] as Megatron sends it; from the last stage [T, H], all tokens on every rank."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # linear_logprob sums its gradient over the vocabulary shards itself, so the backward here only splits.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.squeeze(1)


def build_model(
    architecture: Architecture,
    *,
    tp: int,
    pp: int,
    dtype: torch.dtype,
    max_positions: int,
    overrides: dict[str, Any] | None = None,
) -> HiddenStateModel:
    """This rank's part of the model, at its place in Megatron's groups; weights are random until loaded.

    `overrides` are fields of Megatron's TransformerConfig (recomputation, fusions, uneven stages). Raises ValueError
    for a layout the architecture cannot have, for more positions than it was made for, and for a field that is not the
    user's to set.
    """
    overrides = overrides or {}
    check_layout(architecture, tp=tp, pp=pp, uneven=not UNEVEN_STAGES.isdisjoint(overrides))
    if max_positions > architecture.max_positions:
        raise ValueError(
            f"max_positions {max_positions} exceeds the {architecture.max_positions} of this {architecture.family} "
            "model; shorten prompts and answers"
        )
    config = transformer_config(architecture, tp=tp, pp=pp, dtype=dtype, overrides=overrides)
    with megatron_platform():
        return HiddenStateModel(
            architecture,
            config=config,
            transformer_layer_spec=decoder_spec(
                get_num_layers_to_build(config, pp_rank=parallel_state.get_pipeline_model_parallel_rank()),
                qk_norm=architecture.qk_norm,
                output_bias=architecture.output_bias,
            ),
            vocab_size=padded_vocab_size(architecture.vocab_size, tp),
            max_sequence_length=max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=architecture.tied,
        )


def transformer_config(
    architecture: Architecture, *, tp: int, pp: int, dtype: torch.dtype, overrides: dict[str, Any]
) -> TransformerConfig:
    """Megatron's configuration of this architecture; raises ValueError for an unknown or a decided override."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    decided = {**_shape_fields(architecture), **_layout_fields(tp, pp, dtype)}
    for name in overrides:
        if name not in known:
            raise ValueError(f"megatron.{name}: Megatron's TransformerConfig has no such field")
        if name in decided:
            raise ValueError(f"megatron.{name} is decided by the model folder and the agent's tp, pp; remove it")
    # Without TransformerEngine there is nothing to fuse with; who has apex may switch its part on.
    defaults = {
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    return TransformerConfig(**{**defaults, **overrides, **decided})


def _shape_fields(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_size,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_dim,
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": architecture.qk_norm,
        "add_qkv_bias": architecture.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        # Scores must not depend on a random stream.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _layout_fields(tp: int, pp: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": 1,
        "sequence_parallel": tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        # Micro-batches are packed to different lengths; the dispatcher is what Megatron demands beside it.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # One chunk of dense layers per stage, as decoder_spec builds them.
        "virtual_pipeline_model_parallel_size": None,
        "num_moe_experts": None,
        "mtp_num_layers": None,
        # These would read what this model does not hand them: angles per sequence, and norms that are not torch's.
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def forward_packed(
    model: torch.nn.Module, tokens_T: torch.Tensor, positions_T: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """One forward of this rank's stage over sequences packed end to end; usable in a Megatron forward step.

    tokens_T, positions_T: int64; positions restart in every sequence. cu_seqlens: int32 [B + 1], on the CPU so that
    reading its longest sequence does not wait for the device. T must be a multiple of tp. Returns hidden states [T, H]
    after the final norm on the last stage; on the others, Megatron's [T/tp, 1, H]. Every stage but the first gets its
    input by set_input_tensor.
    """
    assert cu_seqlens.device.type == "cpu", cu_seqlens.device
    num_tokens, tp = tokens_T.numel(), parallel_state.get_tensor_model_parallel_world_size()
    assert num_tokens % tp == 0, (num_tokens, tp)
    assert num_tokens == cu_seqlens[-1], (num_tokens, cu_seqlens)
    device = unwrapped(model).rope_D2.device
    starts, longest = cu_seqlens.to(device, non_blocking=True), int(cu_seqlens.diff().max())
    # Angles come per token already: for the rotary embedding the pack is one sequence (cu_seqlens_*_padded is what
    # Megatron reads there, and nothing else in this model does); on the CPU it costs no wait per layer.
    whole = torch.tensor([0, num_tokens], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    tokens_1T, positions_1T = (tensor.to(device, non_blocking=True)[None] for tensor in (tokens_T, positions_T))
    with megatron_platform():
        return model(input_ids=tokens_1T, position_ids=positions_1T, attention_mask=None, packed_seq_params=packed)


def lm_head_weight(model: torch.nn.Module) -> torch.nn.Parameter:
    """This rank's shard of the head [padded V / tp, H], on the last stage; tied models share the embedding."""
    bare = unwrapped(model)
    assert bare.post_process, "only the last pipeline stage holds the head"
    tied_on_one_stage = bare.pre_process and bare.share_embeddings_and_output_weights
    return bare.shared_embedding_or_output_weight() if tied_on_one_stage else bare.output_layer.weight


def vocab_start(model: torch.nn.Module) -> int:
    """The vocabulary id of the first row of lm_head_weight."""
    bare = unwrapped(model)
    return bare.pg_collection.tp.rank() * (bare.vocab_size // bare.pg_collection.tp.size())


def unwrapped(model: torch.nn.Module) -> HiddenStateModel:
    """The model inside Megatron's wrappers (data parallelism, half precision)."""
    while not isinstance(model, HiddenStateModel):
        model = model.module
    return model


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks; rows from vocab_size on are padding."""
    multiple = VOCAB_MULTIPLE * tp
    return math.ceil(vocab_size / multiple) * multiple


def rope_frequencies(architecture: Architecture) -> torch.Tensor:
    """Rotary frequencies, float32 [D/2]; with Llama-3 scaling, long wavelengths are stretched by `factor`."""
    size = architecture.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    return frequencies if architecture.rope is None else _stretch(frequencies, architecture.rope)


def _stretch(frequencies: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Llama 3.1's rule: keep wavelengths below original/high, divide those above original/low, blend between."""
    turns = rope.original_positions * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rope.factor)


def check_layout(architecture: Architecture, *, tp: int, pp: int, uneven: bool = False) -> None:
    """Raise ValueError if the architecture cannot be cut into tp tensor shards or pp stages, equal ones unless told."""
    for what, size in (("attention heads", architecture.num_heads), ("feed-forward size", architecture.ffn_size)):
        if size % tp:
            raise ValueError(f"tp = {tp} must divide the {what} ({size})")
    if max(architecture.num_kv_heads, tp) % min(architecture.num_kv_heads, tp):
        raise ValueError(f"tp = {tp} must divide the key/value heads ({architecture.num_kv_heads}) or be a multiple")
    if architecture.num_layers % pp and not uneven:
        raise ValueError(
            f"pp = {pp} must divide the {architecture.num_layers} layers, "
            f"unless megatron.{min(UNEVEN_STAGES)} says how many the first stage has"
        )
