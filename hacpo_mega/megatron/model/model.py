"""A Hugging Face architecture as a Megatron model whose last stage returns hidden states, not logits.

The language-model head is a fused kernel outside (hacpo_kernels.linear_logprob), so no [T, V] tensor ever exists here.
Shapes: T tokens of a packed micro-batch, t = T/cp of them on a rank, H hidden size, V vocabulary (V/tp on a rank), P
rotary pairs of a head.

Elsewhere: reading and writing weights (names.py, reshard.py), training (actor.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch.nn.functional import silu

from hacpo_mega.cluster.machine.device import send
from hacpo_mega.config.checks.pass_through import table_problems
from hacpo_mega.megatron.model.context_parallel import own_tokens, recompute_output
from hacpo_mega.megatron.model.delta_net import GatedDeltaNet
from hacpo_mega.megatron.model.layers import decoder_spec
from hacpo_mega.megatron.model.linear import ADDS_AT_ONCE, EmbeddingInFloat32
from hacpo_mega.megatron.model.platform import megatron_platform, plain_torch
from hacpo_mega.megatron.model.rope import (
    cosines_and_sines,
    query_scales,
    rope_frequencies,
    rope_magnitude,
    window_frequencies,
)
from hacpo_mega.megatron.model.shared_prompts import packed_segments
from hacpo_mega.megatron.model.te_layers import te_decoder_spec
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout, chunk_layers, layout_problems
from hacpo_mega.models.sharding.lora import Lora
from hacpo_mega.models.sharding.megatron_fields import decided_fields, field_problems
from hacpo_mega.models.sharding.segments import padded_vocab_size


class HiddenStateModel(GPTModel):
    """GPTModel over packed sequences: rotary by explicit positions, hidden states instead of logits."""

    def __init__(
        self,
        architecture: Architecture,
        chunks: tuple[int, ...],
        *,
        fuses_norms: bool = False,
        later: Sequence["HiddenStateModel"] = (),
        **options: Any,
    ) -> None:
        """`chunks` has the layers of every pipeline chunk; `fuses_norms`: a norm is part of the projection after it.

        `later` are this rank's further chunks, after this first one. Each is forwarded by itself (train/schedule.py),
        but they share parameters, gradients and state.
        """
        super().__init__(position_embedding_type="none", **options)
        self.architecture, self.chunks, self.fuses_norms = architecture, chunks, fuses_norms
        self.lora: Lora | None = None  # megatron/weights/lora.py
        if later:
            self.later = torch.nn.ModuleList(later)
        # Not a buffer: a wrapper that casts the model to half precision must not touch the angles.
        self.rope_P = rope_frequencies(architecture).to(torch.cuda.current_device())
        self.window_rope_P = window_frequencies(architecture).to(torch.cuda.current_device())
        for place, layer in enumerate(self.decoder.layers):
            if not isinstance(layer.self_attention, GatedDeltaNet):
                recompute_output(layer.self_attention)
            layer.mlp.place = place  # index of an expert layer's routing

    @property
    def own_chunks(self) -> list["HiddenStateModel"]:
        """All chunks of this rank, this one first."""
        return [self, *getattr(self, "later", ())]

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Weight [V/tp, H] that Megatron asks a rank for; the head belongs to the rank's last chunk."""
        last = self.own_chunks[-1]
        return super().shared_embedding_or_output_weight() if last is self or self.pre_process else last.head_weight

    @property
    def head_weight(self) -> torch.nn.Parameter:
        """Weight [V/tp, H] of the head, also of a last chunk that is not the first one."""
        return self.output_layer.weight

    def _preprocess(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        decoder_input: None = None,
        padding_mask: torch.Tensor | None = None,
        **_unused: Any,
    ) -> tuple:
        """Embeddings [t/tp, 1, H] (first stage only) and the cosines and sines [T, 1, 1, 4P] of the given positions.

        Layers with a window may have frequencies of their own: those follow the others (rope.py, TwoRopes). If
        queries are scaled, their scaled numbers follow: [T, 1, 1, 8P] (ScaledQueries).
        `padding_mask` goes to every feed-forward unchanged (moe.py).
        """
        with EmbeddingInFloat32():
            hidden = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        if hidden is not None and self.architecture.traits.scaled_embedding:
            # Rounded as the weights are, as transformers and vLLM do.
            hidden = hidden * torch.tensor(self.architecture.hidden_size**0.5, dtype=hidden.dtype).item()
        if hidden is not None and self.lora is not None and torch.is_grad_enabled():
            # A recomputed layer has a gradient only where its input has one.
            hidden.requires_grad_()
        positions_T = position_ids[0].float()
        magnitude = rope_magnitude(self.architecture)
        turns = cosines_and_sines(positions_T, self.rope_P, magnitude, self.config)
        if self.architecture.query_beta:
            scales_T1 = magnitude * query_scales(positions_T, self.architecture)
            turns = torch.cat([turns, cosines_and_sines(positions_T, self.rope_P, scales_T1, self.config)], dim=-1)
        if len(self.window_rope_P):
            turns = torch.cat([turns, cosines_and_sines(positions_T, self.window_rope_P, 1.0, self.config)], dim=-1)
        return hidden, turns[:, None, None, :], None, None, None, padding_mask

    def _postprocess(self, hidden_states: torch.Tensor, **_unused: Any) -> torch.Tensor:
        """Between stages [t/tp, 1, H], as Megatron sends it; from the last [t, H], the same on every tensor rank."""
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
    cp: int = 1,
    ep: int = 1,
    dtype: torch.dtype,
    max_positions: int,
    recompute: str = "none",
    transformer: str = "local",
    overrides: dict[str, Any] | None = None,
) -> HiddenStateModel:
    """Builds this rank's part of the model, at its place in Megatron's groups; weights are random until loaded.

    `recompute` names the activations that backward computes again (none, mlp, full), `transformer` the layer
    implementation (local, te), `overrides` further fields of Megatron's TransformerConfig (fusions, uneven stages).
    Raises ValueError for a layout the architecture cannot have, for more positions than it was made for, and for a
    field that the user may not set.
    """
    cells = parallel_state.get_data_parallel_world_size()
    layout = Layout.of(tp, pp, overrides or {}, cp=cp, ep=ep, cells=cells)
    problems = layout_problems(architecture, layout, max_positions=max_positions)
    if problems := [*problems, *field_problems(overrides or {}, architecture, layout)]:
        raise ValueError("\n".join(problems))
    overrides = {"gradient_accumulation_fusion": ADDS_AT_ONCE[transformer], **(overrides or {})}
    config = transformer_config(architecture, layout, dtype=dtype, recompute=recompute, overrides=overrides)
    model = stage_model(architecture, config, max_positions=max_positions, transformer=transformer)
    # Megatron deals out the layers by itself; this check, and planning without Megatron, use chunk_layers.
    assert model.chunks == chunk_layers(architecture.num_layers, layout), (model.chunks, layout)
    return model


def stage_model(
    architecture: Architecture, config: TransformerConfig, *, max_positions: int, transformer: str = "local"
) -> HiddenStateModel:
    """Megatron's model for this rank's place in its groups, without a check of the layout."""
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)  # Megatron chooses its schedule by it
    rounds = [None] if vpp is None else range(vpp)
    chunks = tuple(get_num_layers_to_build(config, vp_stage=v, pp_rank=r) for v in rounds for r in range(pp))
    spec_of = {"local": decoder_spec, "te": te_decoder_spec}[transformer]

    def chunk(vp_stage: int | None, later: Sequence[HiddenStateModel] = ()) -> HiddenStateModel:
        number = (vp_stage or 0) * pp + parallel_state.get_pipeline_model_parallel_rank()
        first = sum(chunks[:number])
        return HiddenStateModel(
            architecture,
            chunks,
            fuses_norms=transformer == "te",
            later=later,
            config=config,
            transformer_layer_spec=spec_of(architecture, config, range(first, first + chunks[number])),
            vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=max_positions,
            pre_process=number == 0,
            post_process=number == len(chunks) - 1,
            share_embeddings_and_output_weights=architecture.tied,
            vp_stage=vp_stage,
        )

    with megatron_platform():
        model = chunk(rounds[0], later=[chunk(vp_stage) for vp_stage in rounds[1:]])
    # Megatron builds norms of queries and keys by it, then adds up their gradients: only where ranks hold copies.
    config.qk_layernorm = architecture.copies_qk_norm
    return model


def transformer_config(
    architecture: Architecture,
    layout: Layout,
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    overrides: dict[str, Any],
) -> TransformerConfig:
    """Megatron's configuration of this architecture; raises ValueError for an unknown, decided or mistyped override."""
    if problems := list(table_problems(overrides, {})):
        raise ValueError("\n".join(problems))
    from_torch = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "activation_func": silu,
    }
    # The fusions need packages such as apex; users who have these can switch them on.
    defaults = {
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        # A message between stages would wait for the whole device, so for the engine's work, too.
        "batch_p2p_sync": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # cuBLAS may add the partial sums of a split product in bf16; for the whole process, so the engine's, too.
        "disable_bf16_reduced_precision_matmul": True,
    }
    return TransformerConfig(**{**defaults, **overrides, **decided_fields(architecture, layout, recompute, from_torch)})


def forward_packed(
    model: torch.nn.Module,
    tokens_T: torch.Tensor,
    positions_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefixes_S2: torch.Tensor | None = None,
    routing_TLK: torch.Tensor | None = None,
) -> torch.Tensor:
    """One forward of this rank's stage over segments packed end to end; usable in a Megatron forward step.

    Arguments as in records.MicroBatch, on the CPU so that reading the longest segment does not wait for the device:
    tokens_T and positions_T [T], cu_seqlens [S + 1], prefixes_S2 [S, 2]; without `prefixes_S2` no segment attends to
    another. T must be a multiple of tp * cp. Returns hidden states of this rank's tokens: after the final norm [t, H]
    on the last stage; on the others, Megatron's [t/tp, 1, H]. Every stage but the first gets its input by
    set_input_tensor. `routing_TLK`, for all layers, overrides the routers.
    """
    assert cu_seqlens.device.type == "cpu", cu_seqlens.device
    num_tokens, tp = tokens_T.numel(), parallel_state.get_tensor_model_parallel_world_size()
    assert num_tokens == cu_seqlens[-1], (num_tokens, cu_seqlens)
    own = own_tokens(num_tokens)
    num_own = own.stop - own.start
    assert num_own % tp == 0, (num_tokens, num_own, tp)
    packed = packed_segments(cu_seqlens, prefixes_S2)
    routing_tLK = None if routing_TLK is None else _rank_routing(unwrapped(model), routing_TLK[own])
    segments = (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.key_places)
    sent = send((tokens_T[own], positions_T[own], routing_tLK, *segments), unwrapped(model).rope_P.device)
    packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.key_places = sent[3:]
    # Megatron passes a padding mask unchanged to every expert layer: it carries the routing (moe.py).
    inputs = {"input_ids": sent[0][None], "position_ids": sent[1][None], "padding_mask": sent[2]}
    with megatron_platform(), plain_torch():
        return model(**inputs, attention_mask=None, packed_seq_params=packed)


def _rank_routing(model: HiddenStateModel, routing_tLK: torch.Tensor) -> torch.Tensor:
    """Routing [t/tp, own layers, K] of this tensor rank's tokens (neighbours) in this chunk's layers."""
    first = model.decoder.layers[0].layer_number - 1
    mine = routing_tLK.chunk(model.pg_collection.tp.size())[model.pg_collection.tp.rank()]
    return mine[:, first : first + len(model.decoder.layers)].contiguous()


def lm_head_weight(model: torch.nn.Module) -> torch.nn.Parameter:
    """This rank's shard of the head [padded V / tp, H], on the last stage; tied models share the embedding."""
    bare = unwrapped(model).own_chunks[-1]
    assert bare.post_process, "only the last pipeline stage holds the head"
    tied_on_one_stage = bare.pre_process and bare.share_embeddings_and_output_weights
    return bare.shared_embedding_or_output_weight() if tied_on_one_stage else bare.head_weight


def vocab_start(model: torch.nn.Module) -> int:
    """Vocabulary id of the first row of lm_head_weight."""
    bare = unwrapped(model)
    return bare.pg_collection.tp.rank() * (bare.vocab_size // bare.pg_collection.tp.size())


def unwrapped(model: torch.nn.Module) -> HiddenStateModel:
    """The model inside Megatron's wrappers (data parallelism, half precision)."""
    while not isinstance(model, HiddenStateModel):
        model = model.module
    return model
