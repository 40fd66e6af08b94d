"""The bytes that an actor's device holds, counted by running the real Megatron model on tensors without numbers.

torch's FakeTensorMode gives every tensor its shape and no memory, its fake process group stands for a cluster of any
size, and every storage is counted while it lives. So a 70B model on 256 devices is counted on a laptop, with
Megatron's own layers, buffers, optimizer and autograd; memory/actor_bytes.py says the same by formula and is held to
it.
The tensors are on the CPU, where any build of torch runs backward; what CUDA's kernels keep can be asked for.
Elsewhere: the engine, and what no tensor shows (context, NCCL, fragmentation).
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hacpo_kernels import linear_logprob, products
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hacpo_mega.cluster.groups.spans import Spans
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model import attention, layers, linear, moe, rope
from hacpo_mega.megatron.model import model as models
from hacpo_mega.megatron.model.context_parallel import resize
from hacpo_mega.megatron.model.model import build_model, forward_packed, lm_head_weight, unwrapped, vocab_start
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.train.optimizer import ActorOptimizer
from hacpo_mega.megatron.train.overlap import buffers_of
from hacpo_mega.megatron.train.schedule import data_parallel
from hacpo_mega.megatron.weights.lora import attach_adapters
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.lora import Lora

# CUDA's caching allocator hands out multiples of this.
ALLOCATION = 512


@dataclass(frozen=True)
class TracedMemory:
    """Bytes on one rank. States last; the others come on top of the states that are there in their phase.

    gather_buffer   Megatron's buffer for gathering over tensor parallelism, which stays once it was needed
    score           the most that a forward without gradients takes
    saved           what is kept for backward when all micro-batches in flight have been forwarded
    learn           the most that forward and backward take, `saved` among it
    update          the most that the optimizer's step takes
    """

    weights: int
    gradients: int
    main_weights: int
    moments: int
    gather_buffer: int
    score: int
    saved: int
    learn: int
    update: int


def trace_actor(
    architecture: Architecture,
    layout: Layout,
    *,
    dp: int,
    num_tokens: int,
    pp_rank: int = 0,
    in_flight: int = 1,
    recompute: str = "none",
    transformer: str = "local",
    overrides: dict[str, Any] | None = None,
    on_cuda: bool = True,
    whole_heads: bool = False,
    lora: Lora | None = None,
) -> TracedMemory:
    """Counts one rank of an actor of dp cells that learns from micro-batches of `num_tokens`, all of them trained.

    `in_flight` micro-batches of a pipeline stage are forwarded before the first backward. `on_cuda`: bf16, attention
    and norms keep what CUDA's kernels keep; else float32 and what the CPU keeps, whose attention sees one sequence. The
    head is the CPU's either way, since a Triton kernel has no fake. `whole_heads`: attention without flash as on CUDA.
    Needs a process without process groups.
    """
    with ExitStack() as stack:
        stack.enter_context(
            _fake_world(layout, dp, pp_rank * layout.tp * layout.cp, has_experts=architecture.has_experts)
        )
        # A compiler would look for numbers; what it fuses keeps the same for backward.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), _NumbersThatAreKnown(), megatron_platform()):
            stack.enter_context(mode)
        stack.enter_context(_replaced(moe, "_on_host", _even))
        # The formula counts oneDNN's products, which take more memory than those of processors without AVX-512.
        stack.enter_context(_replaced(products, "PREFERS_ONEDNN", True))
        stack.enter_context(_replaced(attention, "needs_whole_heads", lambda _: whole_heads))
        stack.enter_context(_replaced(models, "send", lambda tensors, _: list(tensors)))  # a copy loses its numbers
        if on_cuda:
            stack.enter_context(_replaced(moe, "_fits", lambda *_: True))
            stack.enter_context(_replaced(attention, "_attend_in_groups", attention._attend_flash))
            # CUDA's adds in place; the CPU's takes float32 copies.
            stack.enter_context(_replaced(linear, "add_product", lambda total, left, right: None))
            stack.enter_context(_replaced(moe, "add_grouped_product", lambda total, left, right, ends: None))
            stack.enter_context(
                _replaced(moe, "combine_rows", lambda rows, place, *_: torch.empty_like(rows[: len(place)]))
            )
            stack.enter_context(
                _replaced(moe, "combine_gradients", lambda _, *given: tuple(map(torch.empty_like, given[::2])))
            )
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))  # whose products have memory of their own
            stack.enter_context(_replaced(layers.RMSNorm, "forward", _fused_norm))
            stack.enter_context(_replaced(rope, "rms_norm", _fused_norm_of_values))
        bare = build_model(
            architecture,
            tp=layout.tp,
            pp=layout.pp,
            cp=layout.cp,
            ep=layout.ep,
            dtype=torch.bfloat16 if on_cuda else torch.float32,
            max_positions=num_tokens,
            recompute=recompute,
            transformer=transformer,
            overrides=overrides,
        )
        if lora is not None:
            attach_adapters(bare, lora, seed=1)
        model = data_parallel(bare, Spans())
        optimizer = ActorOptimizer(model, OptimizerConfig(), total_updates=1)
        return _traced(model, optimizer, architecture, num_tokens, in_flight)


def _traced(
    model: DistributedDataParallel,
    optimizer: ActorOptimizer,
    architecture: Architecture,
    num_tokens: int,
    in_flight: int,
) -> TracedMemory:
    run = _Run(model, architecture, num_tokens)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    weights = [*(buffer.param_data for buffer in buffers_of(model)), *frozen]
    gradients = [buffer.grad_data for buffer in buffers_of(model)]
    main = [p for part in optimizer.parts for group in part.shard_fp32_from_float16_groups for p in group]
    states = [*weights, *gradients, *main]
    with _Count(states) as count, torch.no_grad():
        run.head(run.forward())
    buffers = list(parallel_state.get_global_memory_buffer().buffer.values())
    gathered = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
    score = count.peak - gathered
    states += buffers
    with _Count(states) as count:
        outputs = [run.forward() for _ in range(in_flight)]
        saved = count.now
        run.backward(outputs.pop(0))
    learn = count.peak
    with _Count(states) as count:
        _step(optimizer)
        moments = count.now
    adam = [state for part in optimizer.parts for state in part.optimizer.state.values()]
    states += [tensor for state in adam for tensor in tree_leaves(state)]
    with _Count(states) as count:
        _step(optimizer)
    update = count.peak
    return TracedMemory(
        weights=_nbytes(weights),
        gradients=_nbytes(gradients),
        main_weights=_nbytes(main),
        moments=moments,
        gather_buffer=gathered,
        score=score,
        saved=saved,
        learn=learn,
        update=update,
    )


@dataclass(frozen=True)
class _Run:
    """A model with a micro-batch of one sequence, every row of it trained."""

    model: DistributedDataParallel
    architecture: Architecture
    num_tokens: int

    def forward(self) -> torch.Tensor:
        """Hidden states of this stage; one that is not the first gets its input as from the stage before."""
        bare = unwrapped(self.model)
        if not bare.pre_process:
            local = self._own_tokens // bare.pg_collection.tp.size()
            bare.set_input_tensor(
                torch.empty(local, 1, bare.config.hidden_size, dtype=bare.config.params_dtype, requires_grad=True)
            )
        counting = self._counting(self.num_tokens)
        return forward_packed(self.model, counting, counting, torch.tensor([0, self.num_tokens], dtype=torch.int32))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The log-probs of all rows, as the actor asks for them; on other stages than the last the hidden states."""
        if not unwrapped(self.model).post_process:
            return hidden
        weight, tp = lm_head_weight(self.model), parallel_state.get_tensor_model_parallel_group()
        return linear_logprob(
            hidden.index_select(0, self._counting(self._own_tokens)),
            weight,
            self._counting(self._own_tokens) % self.architecture.vocab_size,
            vocab_start=vocab_start(self.model),
            vocab_size=self.architecture.vocab_size,
            softcap=self.architecture.softcap,
            group=tp if tp.size() > 1 else None,
            fuse_main_grad=weight.requires_grad and weight.dtype != torch.float32,
        )

    def backward(self, hidden: torch.Tensor) -> None:
        """From the head, or from what the next stage would send."""
        answer = self.head(hidden)
        del hidden
        torch.autograd.backward(answer, torch.ones_like(answer))

    @property
    def _own_tokens(self) -> int:
        return self.num_tokens // parallel_state.get_context_parallel_world_size()

    def _counting(self, tokens: int) -> torch.Tensor:
        return torch.tensor(range(tokens))  # a literal: the numbers of a micro-batch are known


def _step(optimizer: ActorOptimizer) -> None:
    """Megatron's step after clipping, which takes no memory, by the implementation that torch chooses on CUDA."""
    for group in optimizer.megatron.param_groups:
        group["foreach"], group["fused"] = True, False
    optimizer.megatron.prepare_grads()
    # Gathered in place; torch has no fake of the coalesced gather.
    with _replaced(DistributedDataParallel, "start_param_sync", lambda self: None):
        optimizer.megatron.step_with_ready_grads()


class _Count(TorchDispatchMode):
    """Bytes of the storages that operations made and nobody has let go of, and the most there were.

    torch's MemTracker does this for modules; it takes a module's second forward, and Megatron's attribute `buffers`,
    for errors.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        """`known` are the tensors that were there before; they and their views are not counted."""
        super().__init__()
        self.now = self.peak = 0
        self._sizes = WeakIdKeyDictionary({tensor.untyped_storage(): [0] for tensor in known})

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(args[0] if func is resize.default else answer):
            if isinstance(leaf, FakeTensor):
                self._see(leaf.untyped_storage(), is_resized=func is resize.default)
        return answer

    def _see(self, storage: torch.UntypedStorage, *, is_resized: bool) -> None:
        if storage in self._sizes and not is_resized:
            return
        if storage not in self._sizes:
            self._sizes[storage] = [0]
            weakref.finalize(storage, self._let_go, self._sizes[storage])
        size, (before,) = -(-storage.nbytes() // ALLOCATION) * ALLOCATION, self._sizes[storage]
        self._sizes[storage][0] = size
        self.now += size - before
        self.peak = max(self.peak, self.now)

    def _let_go(self, size: list[int]) -> None:
        self.now -= size[0]


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class _NumbersThatAreKnown(TorchDispatchMode):
    """Above the fake mode: literals stay real, so that code may read lengths and sizes that it was handed.

    Which rows have a gradient nobody knows without numbers: all of them, the most that there can be.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten.nonzero.default:
            return torch.arange(args[0].numel())[:, None]
        return func(*args, **kwargs)


def _even(counts: torch.Tensor, num_rows: int) -> list[list[int]]:
    """As moe.py is told how rows are shared by ranks or by experts, of which nobody has more than another."""
    lines, among = counts.shape
    return [[num_rows * (place + 1) // among - num_rows * place // among for place in range(among)]] * lines


class _FusedNorm(torch.autograd.Function):
    """The allocations of CUDA's kernel; on the CPU torch writes a norm out in float32, a tensor for every operation."""

    @staticmethod
    def forward(ctx, hidden, weight):
        scale = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, _scale = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


def _fused_norm(norm: layers.RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    return _FusedNorm.apply(hidden, norm.weight)


def _fused_norm_of_values(values: torch.Tensor, shape: tuple[int], eps: float) -> torch.Tensor:
    return _FusedNorm.apply(values, values.new_ones(shape))


@contextmanager
def _fake_world(layout: Layout, dp: int, rank: int, *, has_experts: bool = False) -> Iterator[None]:
    """Megatron's groups over torch's fake backend, in which every rank says what this one says."""

    def gather(answers: list[Any], mine: Any, group: Any = None) -> None:
        answers[:] = [mine] * len(answers)

    assert not dist.is_initialized(), "a trace is a world of its own: give it a process without groups"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.cell_size * dp)
    try:
        with _replaced(dist, "all_gather_object", gather):
            ep = layout.ep if has_experts else None
            initialize_parallel(layout.tp, layout.pp, seed=1, cp=layout.cp, ep=ep)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    present = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, present)
