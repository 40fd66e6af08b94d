"""TransformerEngine's layers, where it is installed: which actor uses them, and Megatron's spec of them.

The norm before a projection is part of the projection (names.py knows both forms), norms and matrices are
TransformerEngine's, and attention reads the packed micro-batch (THD). The local layers (layers.py) stay the reference.
bf16 only: fp8 keeps scales that change from one forward to the next, so an answer scored twice would have two scores.
Written against TransformerEngine 2.14 to 2.19. Never imported here: Megatron imports it, after installed.py's check.
"""

import copy

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from hacpo_mega.megatron.model.context_parallel import FromHeads, whole_sequences
from hacpo_mega.megatron.model.layers import RMSNorm, WithBias
from hacpo_mega.megatron.model.linear import GatedActivation
from hacpo_mega.megatron.model.moe import expert_layer
from hacpo_mega.megatron.model.rope import ScaledQueries
from hacpo_mega.models.families.architecture import Architecture


def chosen_transformer(
    asked: str, architecture: Architecture, *, dtype: torch.dtype, on_cuda: bool, version: str | None
) -> str:
    """Layer implementation, "local" or "te", of an actor that asks for "auto", "local" or "te".

    `version` is that of the installed TransformerEngine, None if there is none. ValueError, in one line, if "te" is not
    possible.
    """
    if asked == "te" and not architecture.fits_te:
        raise ValueError(
            f'transformer = "te" is not for this {architecture.family} model, whose norms or windows it lacks: '
            'set transformer = "auto"'
        )
    fits = on_cuda and dtype is torch.bfloat16 and architecture.fits_te
    if asked == "te" and version is None:
        raise ValueError(
            'transformer = "te", but TransformerEngine is not installed here: build it (docs/guide/gpus.md), or set '
            'transformer = "auto"'
        )
    if asked == "te" and not fits:
        found = f"{str(dtype).removeprefix('torch.')} on {'CUDA' if on_cuda else 'the CPU'}"
        raise ValueError(
            f'transformer = "te" is for bfloat16 on CUDA, and this actor is {found}: set transformer = "auto"'
        )
    return "te" if asked != "local" and version is not None and fits else "local"


class PackedTEAttention(torch.nn.Module):
    """TransformerEngine's attention over packed sequences.

    With context parallelism it is built for this rank's share of the heads, and gets all tokens (context_parallel.py).
    """

    def __init__(
        self, attend: type, config: TransformerConfig, pg_collection: ProcessGroupCollection, **place: object
    ) -> None:
        super().__init__()
        self.cp, cp, tp = pg_collection.cp, pg_collection.cp.size(), pg_collection.tp.size()
        share = copy.copy(config)
        share.num_attention_heads //= cp
        share.num_query_groups = max(share.num_query_groups, tp * cp) // cp
        self.from_heads = FromHeads(self.cp)
        self.attend = attend(config=share, pg_collection=pg_collection, **place)

    def forward(
        self,
        query_tND: torch.Tensor,
        key_tKD: torch.Tensor,
        value_tKD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        **megatron_options: object,
    ) -> torch.Tensor:
        """Attention output of this rank's tokens [t, N * D]."""
        whole = whole_sequences(query_tND, key_tKD, value_tKD, self.cp)
        output = self.attend(*whole, attention_mask, packed_seq_params=packed_seq_params, **megatron_options)
        return self.from_heads(output.unflatten(1, (-1, query_tND.shape[2]))).flatten(1)


def te_decoder_spec(architecture: Architecture, config: TransformerConfig, layers: range) -> TransformerBlockSubmodules:
    """Megatron's spec of TransformerEngine's layers, for the layers of one pipeline stage."""
    assert architecture.fits_te, architecture.family
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=architecture.qk_norm)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedTEAttention, params={"attend": attention.core_attention})
    if architecture.query_beta:
        layer.submodules.self_attention.module = ScaledQueries
    if architecture.output_bias:
        attention.linear_proj = ModuleSpec(module=WithBias, params={"linear": attention.linear_proj})
    if architecture.has_experts:  # ours, behind a norm of its own
        layer.submodules.pre_mlp_layernorm = gpt_layer_specs.TENorm
        layer.submodules.mlp = expert_layer(architecture, RMSNorm)
    else:
        activation = ModuleSpec(module=GatedActivation, params={"name": architecture.traits.activation})
        layer.submodules.mlp.keywords["submodules"].activation_func = activation
    return TransformerBlockSubmodules(layer_specs=[layer] * len(layers), layer_norm=gpt_layer_specs.TENorm)
