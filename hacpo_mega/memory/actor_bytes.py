"""Bytes that an actor holds on one device: a formula from the architecture and the layout. Imports no torch.

Every term is a tensor that the code keeps: docs/design/memory.md names where each is allocated, and
tests/unit/memory/test_memory_trace.py compares the sums with the real model (support/memory_trace.py). Letters are
those of arXiv 2205.05198: T tokens of a micro-batch, of which a rank of cp has t = T / cp and each of its tensor ranks
S = t / tp between layers; h hidden size, q and k query and key/value heads of a tensor rank, d head size, f
feed-forward columns and v vocabulary rows of a rank. Elsewhere: the engine, and the parts that are on the device at the
same time (budget.py), and the kernels of the log-probs themselves (kernels/hacpo_kernels).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hacpo_mega.memory.adapter_numbers import is_adapted, kept_by_adapters, num_factors
from hacpo_mega.memory.expert_bytes import ExpertBytes, expert_bytes, replayed_bytes
from hacpo_mega.memory.weight_numbers import expert_weights, num_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout, chunk_ranges, chunks_in_flight
from hacpo_mega.models.sharding.lora import Lora
from hacpo_mega.models.sharding.segments import padded_vocab_size

Recompute = Literal["none", "mlp", "full"]
FLOAT32 = 4
# Largest heads of flash attention (megatron/model/layers.py).
MAX_FLASH_HEAD = 256


@dataclass(frozen=True)
class Device:
    """Properties of a device kind that show in bytes.

    itemsize         bytes of a weight and of an activation; with 2, Adam works on float32 copies of the weights
    flash_attention  attention reads what is packed; else it pads queries, keys and values, and keeps both
    whole_heads      attention without flash pads keys and values for each query head
    triton_head      the head's backward takes large chunks of logits in the weights' type; else small ones in float32
    engine_sleeps    the engine gives its memory back while the actor works
    """

    itemsize: int
    flash_attention: bool
    whole_heads: bool
    triton_head: bool
    engine_sleeps: bool

    @property
    def mixed(self) -> bool:
        """True if weights are kept in half precision and in float32."""
        return self.itemsize < FLOAT32


CUDA = Device(itemsize=2, flash_attention=True, whole_heads=True, triton_head=True, engine_sleeps=True)
CPU = Device(itemsize=4, flash_attention=False, whole_heads=False, triton_head=False, engine_sleeps=False)


def device_of(dtype: str | None, *, on_cpu: bool) -> Device:
    """The kind of device with weights of `dtype`; None is the device's own. Flash attention takes no float32."""
    device = CPU if on_cpu else CUDA
    if dtype is None:
        return device
    mixed = dtype != "float32"
    return replace(device, itemsize=2 if mixed else FLOAT32, flash_attention=device.flash_attention and mixed)


@dataclass(frozen=True)
class ActorPlan:
    """One agent's actor: its model, layout, cells (dp) and micro-batches of at most `num_tokens`.

    diagnoses   own gradients are compared with others', which needs a copy
    offloads    main weights and moments are in host memory while the engine is awake
    shares      agents take turns on the device: outside its turns the whole actor is in host memory
    lora        its adapters, trained in place of the weights; None: the weights are trained
    replayed    tokens whose routing is replayed, at most, in a step's answers and prompts of a cell; 0: none
    """

    architecture: Architecture
    layout: Layout
    dp: int
    num_tokens: int
    recompute: Recompute = "none"
    diagnoses: bool = False
    offloads: bool = False
    shares: bool = False
    device: Device = CUDA
    lora: Lora | None = None
    replayed: int = 0

    @property
    def own_tokens(self) -> int:
        """Tokens of a micro-batch that a rank of cp has."""
        return self.num_tokens // self.layout.cp

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer's state of the same weights, if they are no experts'."""
        return self.dp * self.layout.cp

    @property
    def expert_shards(self) -> int:
        """Number of ranks that share the optimizer of the same experts."""
        return self.dp * self.layout.tp * self.layout.cp // self.layout.ep


@dataclass(frozen=True)
class ActorMemory:
    """Bytes of one pipeline stage on one device.

    moments         Adam's, from the first update on
    gather_buffer   Megatron's for gathering over tensor parallelism, from the first forward on; 0 for frozen weights
    kept            activations that are kept for backward, of all micro-batches in flight
    working         what backward takes on top of them where it takes the most
    forward         what scoring takes, which keeps nothing
    step            what Adam's step takes
    own_gradient    the copy that a diagnosis compares with
    worst_experts   how much more is kept where all tokens ask for the experts of this device; in nothing else
    """

    weights: int
    gradients: int
    main_weights: int
    moments: int
    gather_buffer: int
    kept: int
    working: int
    forward: int
    step: int
    own_gradient: int
    worst_experts: int


def actor_memory(plan: ActorPlan, stage: int = 0) -> ActorMemory:
    """The bytes of pipeline stage `stage`; the layout must be one that the architecture can have."""
    dense, experts = trained_parts(plan, stage)
    held, numbers = num_weights(plan.architecture, plan.layout, stage), dense + experts
    share = sum(shares := (math.ceil(dense / plan.shards), math.ceil(experts / plan.expert_shards)))
    chunks, in_flight = _chunks(plan, stage), chunks_in_flight(plan.layout, stage)
    layer = chunks[0][0][0]
    with_experts = max(sum(count for layer, count in chunk if layer.experts.kept) for chunk in chunks)
    routing = replayed_bytes(plan.architecture, plan.own_tokens // plan.layout.tp, with_experts) if plan.replayed else 0
    worst = max(layer.experts.worst for chunk in chunks for layer, _ in chunk)
    is_last, device = stage == plan.layout.pp - 1, plan.device
    of_head = plan.architecture, plan.layout.tp, plan.own_tokens, device.itemsize
    head = head_bytes(*of_head, triton=device.triton_head, learns=plan.lora is None) if is_last else 0
    return ActorMemory(
        weights=(held if plan.lora is None else held + numbers) * plan.device.itemsize,
        gradients=numbers * FLOAT32,
        main_weights=share * FLOAT32 if plan.device.mixed else 0,
        moments=share * 2 * FLOAT32,
        gather_buffer=layer.gathered if plan.layout.tp > 1 and plan.lora is None else 0,
        kept=in_flight * (max(_kept(plan, chunk, is_last=is_last) for chunk in chunks) + _masks(plan, stage) + routing),
        working=max(*(max(_in_layers(plan, chunk, is_last)) for chunk in chunks), head),
        forward=max(_forward(plan, layer, is_last) for chunk in chunks for layer, _ in chunk),
        # The square root of the second moment, of all parameters at once, of experts after the others.
        step=max(shares) * FLOAT32,
        own_gradient=share * FLOAT32 if plan.diagnoses else 0,
        worst_experts=worst * (in_flight * with_experts if plan.recompute == "none" else 1),
    )


def trained_parts(plan: ActorPlan, stage: int = 0) -> tuple[int, int]:
    """Numbers that a rank has a gradient of, its weights or adapters: of all but experts, and of experts."""
    counted = plan.architecture, plan.layout, stage
    if plan.lora is not None:
        return num_factors(*counted, plan.lora)
    experts = expert_weights(*counted)
    return num_weights(*counted) - experts, experts


@dataclass(frozen=True)
class _Layer:
    """Bytes of the tensors of one layer and one micro-batch.

    residual   [S, h], between the layers; gathered [t, h]
    norm       what a norm keeps beside its input, its output among it
    attention  all that attention keeps, its norm included
    ffn        [t, f], of shared experts where there are others; mlp: all that is kept there, its norm not included
    down       the gradient of the feed-forward's second matrix, if it is trained
    unread     what this matrix reads, if it is not kept
    more_norms what norms keep beyond two
    experts    what is there in the place of a feed-forward, where the model has experts
    delta      what a forward of a delta net takes behind its projection; backward, which redoes it, twice that
    """

    residual: int
    gathered: int
    norm: int
    attention: int
    ffn: int
    mlp: int
    down: int
    unread: int
    more_norms: int
    experts: ExpertBytes
    delta: int

    @classmethod
    def of(cls, plan: ActorPlan) -> "_Layer":
        a, tp, tokens, itemsize = plan.architecture, plan.layout.tp, plan.own_tokens, plan.device.itemsize
        columns = (a.shared_ffn if a.has_experts else a.ffn_size) // tp
        residual, ffn = tokens // tp * a.hidden_size * itemsize, tokens * columns * itemsize
        norm = residual + tokens // tp * FLOAT32
        experts = expert_bytes(a, plan.layout, tokens, itemsize, plan.lora)
        # The norm before is part of the block there, which has five. A gather reads what one gives, and keeps nothing;
        # the router's, but a frozen one's, and the feed-forward's keep their output, both behind these their input.
        beside = a.has_experts and a.traits.experts.beside
        keeps = plan.lora is None or is_adapted(a, plan.lora, "mlp.linear_fc2", "mlp.shared.linear_fc2")
        return cls(
            residual=residual,
            gathered=tokens * a.hidden_size * itemsize,
            norm=norm,
            attention=norm + _attention(plan) + _factors(plan, "self_attention"),
            ffn=ffn,
            # Gate and up, and their product; the output of shared experts, which their gate multiplies.
            mlp=3 * ffn
            + residual * a.gates_shared
            + experts.kept
            + _factors(plan, "mlp")
            + beside * (5 * norm - (1 + (plan.lora is not None)) * residual),
            down=0 if plan.lora is not None else a.hidden_size * columns * itemsize,
            unread=0 if keeps else ffn,
            # One after a block keeps its input in place of its output, which joins the residual.
            more_norms=(len(a.traits.norms) - 2 - beside) * norm,
            experts=experts,
            delta=_delta_net(plan),
        )

    def kept(self, recompute: Recompute) -> int:
        """Bytes a layer keeps for backward: always its input; the second norm reads what attention added to it."""
        if recompute == "full":
            return self.residual
        norms = self.norm + self.more_norms
        return 2 * self.residual + self.attention + norms + (self.mlp if recompute == "none" else 0)

    def working(self, recompute: Recompute, tp: int) -> int:
        """Bytes that the backward of one layer takes: its recomputed activations with its output, the gradient of that
        output, and the largest of three moments of the feed-forward. At the second matrix's gradient: that gradient,
        that of the output, gathered, and the matrix's input. At the activation, after that input is freed, if it was
        kept: the gradients of gate and up. At the first matrix's gradient: these and that of its input."""
        again = {"none": 0, "mlp": self.mlp + self.residual, "full": self.kept("none")}[recompute]
        second = (self.gathered if tp > 1 else 0) + self.ffn + self.down
        first = self.gathered + 2 * self.down - self.ffn + self.unread
        experts = self.experts.working
        if experts and self.ffn:  # which come after shared ones have let go of theirs and left a gradient of the input
            experts += self.residual - 3 * self.ffn
        delta = 2 * self.delta - self.mlp  # which comes when the feed-forward has let go of all
        moments = (second, 2 * (self.ffn + self.unread), first) if self.ffn else (0,)
        return again + self.residual + max(experts, delta, *moments)


def _factors(plan: ActorPlan, block: str) -> int:
    """Bytes that a block keeps more, or less, if its adapters are trained in place of its matrices."""
    if plan.lora is None:
        return 0
    counted = plan.architecture, plan.layout, plan.lora, block, plan.own_tokens
    return kept_by_adapters(*counted, flash=_is_flash(plan)) * plan.device.itemsize


def _is_flash(plan: ActorPlan) -> bool:
    return plan.device.flash_attention and plan.architecture.heads_in(0).size <= MAX_FLASH_HEAD


def _attention(plan: ActorPlan) -> int:
    """Bytes that attention keeps after its norm."""
    a, tokens, itemsize = plan.architecture, plan.own_tokens, plan.device.itemsize
    tp, cp = plan.layout.tp, plan.layout.cp
    if a.latent is not None:
        return _latent_attention(plan)
    if a.delta_net is not None and a.has_delta_net_in(0):  # of a layer alone: the projection, and the output
        return tokens * itemsize * (a.delta_net.projected_rows + a.delta_net.value_rows) // tp
    own, flash = a.heads_in(0), _is_flash(plan)
    q, k = a.num_heads // tp, max(1, own.kv_heads // tp)
    head = tokens * own.size * itemsize  # of one head; that of all tokens and 1 / cp of the heads is as large
    met = max(k, cp)  # keys and values; each rank has its own copy
    # Rotated queries and keys, values, the output, a float32 number per token and query head.
    kept = (q + 2 * (q if plan.device.whole_heads and not flash else met) + q) * head
    kept += plan.num_tokens * (q // cp) * FLOAT32
    if not flash:
        # The output again without padding, rotated queries and keys again beside their padded copies.
        kept += (q + q + met) * head
    # A gate, its sigmoid, and the output that it has been applied to.
    kept += 3 * q * head if a.gated else 0
    kept += tokens * k * FLOAT32 if a.traits.value_norm else 0
    if cp > 1 and not flash:
        # Values beside their padded copy.
        kept += met * head
    if a.traits.whole_qk_norm and plan.device.mixed:
        # The numbers and the normalised ones, both in float32, and nothing of the projection.
        return kept + 2 * tokens * a.head_dim * FLOAT32 * (q + k)
    if a.qk_norm or not (flash or cp > 1):
        # A view of keys or values keeps all of the fused projection, of a group whose ranks share it all queries.
        kept += (q * max(1, tp // own.kv_heads) + (1 + own.has_values) * k) * head
    if a.qk_norm:
        # Queries are copied out of the projection for their norm unless they lie at equal distances there; a gate, too.
        kept += (q if (k > 1 or a.gated) and k < q else 0) * head + tokens * (q + k) * FLOAT32
        # One over all heads is written out, and keeps the normalised numbers.
        kept += (q + k) * head if a.traits.whole_qk_norm else 0
    return kept


def _latent_attention(plan: ActorPlan) -> int:
    """The same of attention with latents: both before and after their norms; queries, keys, and values as long; the
    output as long and, but with cp, which makes it again, as the projection reads it."""
    a, tokens, itemsize, latent = plan.architecture, plan.own_tokens, plan.device.itemsize, plan.architecture.latent
    assert latent is not None, a.family
    heads, own = a.num_heads // plan.layout.tp, tokens // plan.layout.tp
    latents = own * itemsize * (2 * latent.query_rank + latent.cached + latent.rank)
    latents += own * FLOAT32 * (1 + (latent.query_rank > 0))
    # Without flash attention padded copies of all but values, too.
    copies = 4 if plan.device.flash_attention else 7
    of_heads = copies * a.head_dim + (latent.value_dim if plan.layout.cp == 1 else 0)
    return latents + heads * tokens * of_heads * itemsize + plan.num_tokens * (heads // plan.layout.cp) * FLOAT32


# Tokens of one chunk in the chunked rule of delta nets (megatron/model/delta_net.py).
DELTA_CHUNK = 64


def _delta_net(plan: ActorPlan) -> int:
    """Bytes of the rule in float32: for every token and head of values four times its numbers, and seven rows of a
    chunk's matrices; 0 for attention."""
    if (delta := plan.architecture.delta_net) is None or not plan.architecture.has_delta_net_in(0):
        return 0
    numbers = 4 * (2 * delta.key_dim + delta.value_dim) + 7 * DELTA_CHUNK
    return plan.own_tokens * delta.value_heads // plan.layout.tp * numbers * FLOAT32


# The layers of a chunk by their kinds, in order: one of them, and how many there are.
_Chunk = list[tuple[_Layer, int]]


def _chunks(plan: ActorPlan, stage: int) -> list[_Chunk]:
    """Chunks of a pipeline stage: its kinds of layers and their numbers."""
    ranges = chunk_ranges(plan.architecture.num_layers, plan.layout, stage)
    kinds = (plan.architecture.kinds(layers) for layers in ranges)
    return [[(_Layer.of(replace(plan, architecture=thin)), count) for thin, count in of.items()] for of in kinds]


def _kept(plan: ActorPlan, chunk: _Chunk, *, is_last: bool) -> int:
    layer = chunk[-1][0]
    layers = sum(count * layer.kept(plan.recompute) for layer, count in chunk)
    return layers + _rope_bytes(plan) + (_final_norm(layer) if is_last else layer.residual)


def _rope_bytes(plan: ActorPlan) -> int:
    """Cosines and sines of the tokens' positions, the same for all layers."""
    return 2 * plan.own_tokens * plan.architecture.angle_size * plan.device.itemsize


def _masks(plan: ActorPlan, stage: int) -> int:
    """Bytes that masks of layers with a window keep for backward, in the chunk where they keep the most."""
    if plan.recompute == "full" or not plan.architecture.windows:
        return 0
    chunks = chunk_ranges(plan.architecture.num_layers, plan.layout, stage)
    return max(sum(_mask(plan, layer) for layer in chunk) for chunk in chunks)


def _mask(plan: ActorPlan, layer: int) -> int:
    """Bytes of a mask without flash attention, of a window or beside sinks: a number per pair of tokens, of one
    sequence at the most."""
    window, sinks = plan.architecture.window_of(layer), plan.architecture.traits.sinks
    hides = sinks or (window is not None and window < plan.num_tokens)
    return plan.num_tokens**2 * FLOAT32 if hides and not plan.device.flash_attention else 0


def _final_norm(layer: _Layer) -> int:
    """Bytes of the final norm: a norm's, with its input in place of its output, which is gathered for the head."""
    return layer.norm + layer.gathered


def _in_layers(plan: ActorPlan, chunk: _Chunk, is_last: bool) -> Iterator[int]:
    """Bytes that backward takes in the first layer it reaches of each kind, after the final norm and all layers of
    other kinds behind it have freed their tensors."""
    gone = _final_norm(chunk[-1][0]) if is_last else 0
    for layer, count in reversed(chunk):
        yield layer.working(plan.recompute, plan.layout.tp) + _waiting_gradient(plan) - gone
        # Delta nets and attention alternate: few layers of one kind are behind the last one of the other.
        gone += (1 if plan.architecture.delta_net is not None else count) * layer.kept(plan.recompute)


def _waiting_gradient(plan: ActorPlan) -> int:
    """Bytes of the gradient that a tied weight has from the head, which waits for the embedding's."""
    a, tp = plan.architecture, plan.layout.tp
    is_shared = a.tied and plan.layout.pp == 1 and plan.lora is None
    return padded_vocab_size(a.vocab_size, tp) // tp * a.hidden_size * plan.device.itemsize if is_shared else 0


def _forward(plan: ActorPlan, layer: _Layer, is_last: bool) -> int:
    """Bytes of a forward without gradients: of one layer's tensors, which the next one's replace, or of the head's."""
    a, tp, tokens = plan.architecture, plan.layout.tp, plan.own_tokens
    # Inputs of the stage, of the layer and of its second norm, that norm's output.
    experts = layer.experts.forward
    inside = 4 * layer.residual + max(experts, 3 * layer.ffn + (layer.residual if experts else 0)) + _rope_bytes(plan)
    if plan.lora is not None and is_adapted(a, plan.lora, "mlp.linear_fc1", "mlp.shared.linear_fc1"):
        inside += 3 * layer.ffn  # what an adapter adds to gate and up, and their sum
    inside += max((_mask(plan, number) for number in range(len(a.windows))), default=0) * 5 // 4  # of truth values
    if layer.delta:
        inside = max(
            inside, 2 * layer.residual + tokens * a.delta_net.projected_rows // tp * plan.device.itemsize + layer.delta
        )
    columns = padded_vocab_size(a.vocab_size, tp) // tp
    head = 2 * layer.gathered
    if not plan.device.triton_head:
        rows = min(tokens, logit_rows(columns, triton=False))
        head += rows * columns * FLOAT32 * (1 if rows == tokens else 2)
        head += (columns + rows) * a.hidden_size * FLOAT32 if plan.device.mixed else 0  # weights, hidden states
    return max(inside, head if is_last else 0)


# Constants of kernels/hacpo_kernels, which cannot be imported without torch: rows of the logits' gradient that are held
# at once, and the most of a product that is added to a gradient at once.
TRITON_ELEMENTS, TRITON_ROWS, REFERENCE_ELEMENTS, ADDED_ELEMENTS = 1_250_000_000, 8192, 1 << 24, 1 << 20


def head_bytes(a: Architecture, tp: int, tokens: int, itemsize: int, *, triton: bool, learns: bool = True) -> int:
    """The most bytes that the head takes, if all of a rank's `tokens` are trained, in numbers of `itemsize` bytes.

    Unless it `learns`, its weight has no gradient.
    """
    columns, mixed = padded_vocab_size(a.vocab_size, tp) // tp, itemsize < FLOAT32
    rows, row = min(tokens, logit_rows(columns, triton=triton)), a.hidden_size
    weight = columns * row * itemsize
    # Summed over the ranks in float32, then cast.
    gradient = tokens * row * (FLOAT32 if tp > 1 else itemsize)
    cast = tokens * row * itemsize if tp > 1 and mixed else 0
    logit = itemsize if triton else FLOAT32
    operand = columns * row * FLOAT32 if mixed and not triton else 0
    # A chunk of logits; its rows of hidden, and a product: the gradient of these, or, in float32, a part of the
    # weight's, before it is added.
    part = 0 if triton or mixed or not learns else min(columns * row, ADDED_ELEMENTS)
    logit += 0 if triton or a.softcap is None else FLOAT32  # the slopes of capped ones
    in_chunk = rows * (columns * logit + row * itemsize) + max(rows * row, part) * FLOAT32
    # In half precision the weight's gradient goes into Megatron's buffer, and autograd gets a placeholder; in float32
    # it is a tensor of its own from the start.
    placeholder, own = (weight * learns, 0) if mixed else (0, weight * learns)
    at_end = max(gradient + cast, (cast or gradient) + placeholder)
    return operand + own + max(gradient + in_chunk, at_end)


def logit_rows(columns: int, *, triton: bool) -> int:
    """Rows of one chunk of logits over `columns` of the vocabulary, as the kernels choose them."""
    if triton:
        return max(128, min(TRITON_ROWS, TRITON_ELEMENTS // columns // 128 * 128))
    return max(1, REFERENCE_ELEMENTS // columns)
