"""Pipeline schedule of micro-batches: forward alone, or forward and backward into the model's gradient buffers.

The scaling law, in one place. After `accumulate_gradients` the buffers hold

    d/dw  sum over cells, sum over their micro-batches, of  loss

a plain sum, over the ranks of data and of context parallelism (though each of the latter holds the whole loss:
context_parallel.py says why). Nothing divides by the number of micro-batches, of ranks or of tokens. For a mean, the
loss itself divides by a count of the whole update, which every rank has. So a gradient depends neither on the packing
of samples nor on the number of ranks, and a rank without samples adds zero.

Megatron's own defaults divide twice (by num_microbatches in the schedule, by the data-parallel size in DDP). Its
`calculate_per_token_loss` switches both off and would instead divide by a token count in `finalize_model_grads`; that
count is withheld here. tests/jobs/test_gradient_invariance.py holds the law against Hugging Face.

Cells that share experts run equally many micro-batches (`evened`): rows of tokens go to experts in other replicas and
back, forward and backward, so all of these must be in the same layer at the same time. A replica with fewer than the
fullest gets empty ones: some padding, whose rows travel as others do, and nothing trained. Own answers and others' are
filled up apart where they are packed apart: an expert then computes the same rows of all replicas together, with the
same bits, when own answers are scored and when an update learns from them. Empty ones come first, so that a backward
ends with a real one wherever it can (overlap.py).

Elsewhere: which sequences share a micro-batch (samples/packing.py), who counts the rows of an expert (router.py), and
what these numbers mean in a run (logbook/files/metrics.py).
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.nn.functional import pad

from hacpo_mega.cluster.groups.spans import Spans
from hacpo_mega.cluster.groups.tree import as_tensor, join, split
from hacpo_mega.cluster.machine.device import send
from hacpo_mega.config import DataParallelConfig
from hacpo_mega.megatron.model.model import HiddenStateModel, forward_packed, unwrapped
from hacpo_mega.megatron.model.router import PADDING, UNROUTED, coefficients
from hacpo_mega.megatron.train.optimizer import OptimizerStep
from hacpo_mega.megatron.train.overlap import buffers_of, reduction_inside_backward, wait_before_use
from hacpo_mega.records import ExpertLoad, MicroBatch, Sample, TokenSequence, UpdateStats
from hacpo_mega.samples.packing import empty_microbatch

# (hidden states of the last stage, micro-batch) -> anything; with gradients (scalar loss, NO_TOKEN_COUNT, anything)
LastStage = Callable[[torch.Tensor, MicroBatch], Any]

DATA_PARALLEL = DataParallelConfig()
# Megatron divides by this count where it is not zero, so a zero here switches that division off: see the law above.
NO_TOKEN_COUNT = torch.zeros((), dtype=torch.int)


def data_parallel(
    model: HiddenStateModel, spans: Spans, options: DataParallelConfig = DATA_PARALLEL
) -> DistributedDataParallel:
    """Wraps the model for data parallelism under the law above, with its gradient buffers.

    Cells wait for each other where the reduction ends, so that is one of the `spans`.
    """
    model.config.calculate_per_token_loss = True
    model.config.finalize_model_grads_func = partial(_reduce_gradients, spans)
    options = options.by_nodes(())  # where nobody has decided: one node
    wrapping = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, **options.model_dump()
    )
    wrapped = DistributedDataParallel(model.config, wrapping, model)
    if options.overlap_grad_reduce:
        model.config.no_sync_func = wrapped.no_sync  # until the last micro-batch
    if options.overlap_param_gather:
        wait_before_use(wrapped)
    return wrapped


def forward_only(model: DistributedDataParallel, batches: Sequence[MicroBatch], last_stage: LastStage) -> list[Any]:
    """Calls `last_stage` on every micro-batch with sequences, in order, without gradients.

    Returns its results; an empty list on other pipeline stages.
    """
    if not batches:
        return []

    longest, run = _longest(batches), get_forward_backward_func()

    def step(batches_left, model):
        batch = next(batches_left)
        function = last_stage if batch.sequences else lambda hidden_TH, batch: None
        return _forward(model, batch, longest), lambda hidden_TH, non_loss_data: function(hidden_TH, batch)

    with torch.no_grad():
        pipeline = _pipeline(model, batches)
        results = run(forward_step_func=step, forward_only=True, collect_non_loss_data=True, **pipeline)
        return _without_empty(results, batches)


def accumulate_gradients(
    model: DistributedDataParallel, batches: Sequence[MicroBatch], last_stage: LastStage
) -> list[Any]:
    """Fills the gradient buffers as the law says.

    Returns the third result of `last_stage`, behind loss and count, for the micro-batches with sequences, in order.
    Collective over the agent's ranks. A rank without micro-batches runs no pipeline (no rank of its cell has any) and
    joins the reduction with zeros. RuntimeError while the buffers are offloaded (optimizer.py).
    """
    if not all(buffer.grad_data.numel() for buffer in buffers_of(model)):
        raise RuntimeError("the gradient buffers have left the device: learning is for a turn that was begun to learn")
    model.zero_grad_buffer()
    longest, run = _longest(batches), get_forward_backward_func()

    def step(batches_left, model):
        batch = next(batches_left)
        return _forward(model, batch, longest), partial(last_stage, batch=batch) if batch.sequences else _zero_loss

    # An empty micro-batch gives the head no gradient, so the reduction must not wait for it in the last one.
    with reduction_inside_backward(model, has_samples=bool(batches) and bool(batches[-1].sequences)):
        if batches:
            return _without_empty(run(forward_step_func=step, forward_only=False, **_pipeline(model, batches)), batches)
        model.config.finalize_model_grads_func([model])
        return []


def _without_empty(results: Sequence[Any], batches: Sequence[MicroBatch]) -> list[Any]:
    """Results of the micro-batches with sequences; `results` begin with those of `_pipeline`'s empty ones."""
    return [result for number, result in enumerate(results[-len(batches) :]) if batches[number].sequences]


def _longest(batches: Sequence[MicroBatch]) -> int:
    """Tokens of the longest micro-batch. By index: iteration would report progress."""
    return max((len(batches[number].tokens_T) for number in range(len(batches))), default=0)


def _forward(model: torch.nn.Module, batch: MicroBatch, longest: int) -> torch.Tensor:
    """Forward of a stage, or of a chunk of it.

    All messages are as long as those of the `longest` micro-batch. Megatron's exchange of true shapes waits for the
    whole device, and deadlocks between chunks: a rank that sends forward and backward at once waits for the shapes of
    both, while its neighbour sends one after the other, and waits for the first tensor before it sends the second's
    shape.
    """
    bare, pack = unwrapped(model), (batch.tokens_T, batch.positions_T, batch.cu_seqlens, batch.prefixes_S2)
    pack = *pack, _routing(bare, batch)
    ranks = bare.config.tensor_model_parallel_size * parallel_state.get_context_parallel_world_size()
    own = len(batch.tokens_T) // ranks
    if not bare.pre_process:
        bare.decoder.input_tensor = bare.decoder.input_tensor[:own]
    hidden, missing = forward_packed(model, *pack), longest // ranks - own
    return hidden if bare.post_process or not missing else pad(hidden, (0, 0, 0, 0, 0, missing))


def _routing(model: HiddenStateModel, batch: MicroBatch) -> torch.Tensor | None:
    """Replayed routing of a micro-batch [T, L, K]; padding is marked if it must be left out of the auxiliary losses."""
    if not (model.architecture.has_experts and any(coefficients(model.config)) and torch.is_grad_enabled()):
        return batch.routing_TLK
    routing_TLK = batch.routing_TLK
    if routing_TLK is None:
        routing_TLK = torch.full((len(batch.tokens_T), model.architecture.num_layers, 1), UNROUTED, dtype=torch.int16)
    return torch.cat([routing_TLK[: batch.num_tokens], torch.full_like(routing_TLK[batch.num_tokens :], PADDING)])


def _zero_loss(hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Loss of an empty micro-batch: 0."""
    return 0.0 * hidden_TH.sum(), NO_TOKEN_COUNT, None


def _pipeline(model: DistributedDataParallel, batches: Sequence[MicroBatch]) -> dict[str, Any]:
    """Arguments of Megatron's schedules for these micro-batches, with or without gradients.

    With several chunks per stage, every chunk takes them once, in rounds of pp: the first round is filled with empty
    ones. (In the last micro-batch every parameter must get a gradient, or its bucket is not reduced in time.)
    """
    chunks = unwrapped(model).own_chunks
    config, missing = model.config, 0
    if len(chunks) > 1:
        missing = -len(batches) % config.pipeline_model_parallel_size
    cp = parallel_state.get_context_parallel_world_size()
    empty = [empty_microbatch(config.tensor_model_parallel_size * cp)] * missing
    iterators = [itertools.chain(empty, batches) for _ in chunks]
    return {
        "data_iterator": iterators if len(chunks) > 1 else iterators[0],
        "model": [model, *chunks[1:]],
        "num_microbatches": len(batches) + missing,
        "seq_length": _longest(batches),
        "micro_batch_size": 1,
    }


def _reduce_gradients(spans: Spans, models: list, _num_tokens: torch.Tensor | None = None, **groups: Any) -> None:
    """Sums gradients over cells and cp ranks, over sequence-parallel and tied-embedding groups; divides by nothing."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    first = dist.get_process_group_ranks(group)[0]
    with spans.span("reduce gradients", "collective", f"gradients/{spans.owner}/{first}"):
        finalize_model_grads(models[:1], None, **groups)  # with the gradients of all chunks


def sum_over_cells(value: torch.Tensor | float, device: torch.device) -> float:
    """Sums a scalar over cells, which all ranks of this stage of a cell hold; an update's loss is the last stage's."""
    total = torch.as_tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.item()


def tensor_from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcasts the last pipeline stage's `tensor` [any shape] to every stage.

    The others pass a tensor of its shape, which is overwritten.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(tensor, source, group=parallel_state.get_pipeline_model_parallel_group())
    return tensor


def object_from_last_stage(value: Any, records: Sequence[type], device: torch.device) -> Any:
    """Broadcasts a value of a few kilobytes (`to_bytes`); `records` are its classes of named tuples."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    is_source = dist.get_rank() == parallel_state.get_pipeline_model_parallel_last_rank()
    message = as_tensor(to_bytes(value) if is_source else b"").to(device)
    size = tensor_from_last_stage(torch.tensor([len(message)], device=device))
    message = message if is_source else torch.empty(int(size), dtype=torch.uint8, device=device)
    tensor_from_last_stage(message)
    return value if is_source else from_bytes(message.cpu().numpy().tobytes(), records)


DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}


def to_bytes(value: Any) -> bytes:
    """Encodes the message of a pipeline's last stage. TypeError for anything but plain values and tensors."""
    tensors: list[bytes] = []
    return join([json.dumps(_described(value, tensors)).encode(), *tensors])


def from_bytes(message: bytes, records: Sequence[type]) -> Any:
    """Inverse of `to_bytes`; `records` are the classes of named tuples that may be in it, by their names."""
    text, *tensors = split(message)
    return _read(json.loads(text), iter(tensors), {record.__name__: record for record in records})


def _described(value: Any, tensors: list[bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"tensor": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, tuple | list):
        entries = [_described(entry, tensors) for entry in value]
        return {"type": type(value).__name__, "entries": entries}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a report of a loss holds a {type(value).__name__}, which no message of a stage does")


def _read(described: Any, tensors: Any, records: dict[str, type]) -> Any:
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        numbers = as_tensor(next(tensors)).view(DTYPES[described["tensor"]])
        return numbers.reshape(described["shape"])
    entries = [_read(entry, tensors, records) for entry in described["entries"]]
    if (name := described["type"]) in ("list", "tuple"):
        return entries if name == "list" else tuple(entries)
    return records[name](*entries)


# ---- micro-batches: equal counts over the replicas that share experts, progress, copies, statistics


class EvenBatches(list):
    """Micro-batches with counts balanced across cells; iteration reports progress."""

    def __init__(self, batches: Sequence[MicroBatch], on_progress: Callable[[], None]) -> None:
        super().__init__(evened(batches))
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch in super().__iter__():
            self._on_progress()
            yield batch


def sequence_indices(sequences: Sequence[TokenSequence], batch: MicroBatch) -> list[int]:
    """Index in `sequences` of each sequence of a micro-batch."""
    # By identity: comparing records would compare their token arrays.
    index_of = {id(sequence): index for index, sequence in enumerate(sequences)}
    return [index_of[id(sequence)] for sequence in batch.sequences]


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch with `row_cu_seqlens_B`, the one of its tensors that a loss function reads, on the device."""
    (starts_B,) = send((batch.row_cu_seqlens_B,), device)
    return replace(batch, row_cu_seqlens_B=starts_B)


def update_stats(
    batches: Sequence[MicroBatch],
    loss: float,
    reports: Sequence[Any],
    step: OptimizerStep,
    experts: ExpertLoad | None,
) -> UpdateStats:
    """Statistics of an update from these micro-batches."""
    return UpdateStats(
        reports=tuple(reports),
        loss=loss,
        grad_norm=step.grad_norm,
        lr=step.lr,
        skipped=not step.applied,
        num_microbatches=len(batches),
        num_samples=sum(len(batch.sequences) for batch in batches),
        num_tokens=sum(batch.num_tokens for batch in batches),
        num_trained=sum(len(batch.rows_R) for batch in batches),
        experts=experts,
    )


def evened(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches, in their order, with empty ones among them if other cells share the experts.

    Then collective over the ranks that share experts.
    """
    ranks = parallel_state.get_tensor_and_context_parallel_world_size()
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() <= ranks:
        return list(batches)
    num_own = next((number for number, batch in enumerate(batches) if _is_of_others(batch)), len(batches))
    parts = batches[:num_own], batches[num_own:]
    counts_2 = torch.tensor([len(part) for part in parts], device=torch.cuda.current_device())
    dist.all_reduce(counts_2, op=dist.ReduceOp.MAX, group=group)
    return [
        batch
        for part, count in zip(parts, counts_2.tolist(), strict=True)
        for batch in [*[empty_microbatch(ranks)] * (count - len(part)), *part]
    ]


def _is_of_others(batch: MicroBatch) -> bool:
    """True if it has other agents' answers. Scored sequences, which are no samples, are own ones."""
    first = batch.sequences[0]
    return isinstance(first, Sample) and not first.is_self


class ExpertCounts:
    """Reads the counters of the routers in this rank's part of a model; there are none without experts."""

    def __init__(self, model: HiddenStateModel) -> None:
        layers = [layer for chunk in model.own_chunks for layer in chunk.decoder.layers]
        self._architecture = model.architecture
        # Megatron counts the layers of the whole model, from 1 on.
        numbers = {layer.layer_number - 1: layer.mlp for layer in layers}
        self._routers = {n: mlp.router for n, mlp in numbers.items() if model.architecture.has_experts_in(n)}
        self._coefficients, self._num_tokens = coefficients(model.config), 0
        self._has_losses = model.architecture.has_experts and any(self._coefficients)

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Resets the counters; until `load` the routers also learn from their auxiliary losses.

        `batches` are this cell's. Collective over the agent where there are such losses.
        """
        if self._has_losses:
            total = torch.tensor(sum(batch.num_tokens for batch in batches), device=torch.cuda.current_device())
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            self._num_tokens = int(total)
        for router in self._routers.values():
            router.load_E.zero_()
            router.replayed_2.zero_()
            router.losses_2.zero_()
            router.num_tokens = self._num_tokens

    def load(self) -> ExpertLoad | None:
        """Load since `begin`; None if no token had experts. Collective over the agent, if it has experts."""
        a = self._architecture
        if not a.has_experts:
            return None
        counts_LN = torch.zeros(
            a.expert_layers, a.num_experts + 2, dtype=torch.int64, device=torch.cuda.current_device()
        )
        # Ranks of tp and cp have other tokens, those of pp other layers.
        for layer, router in self._routers.items():
            counts_LN[layer - a.dense_layers] = torch.cat([router.load_E, router.replayed_2])
        dist.all_reduce(counts_LN)
        found = expert_load(counts_LN[:, :-2], counts_LN[:, -2:])
        for router in self._routers.values():
            router.num_tokens = 0
        return found if found is None or not self._has_losses else replace(found, **self._losses())

    def _losses(self) -> dict[str, float]:
        """Means over tokens and layers of the enabled losses. Collective over the agent."""
        sums_2 = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        for router in self._routers.values():
            sums_2 += router.losses_2
        dist.all_reduce(sums_2)
        means = (sums_2 / (self._num_tokens * self._architecture.expert_layers)).tolist()
        names = ("aux_loss", "z_loss")
        return {name: mean for name, mean, wanted in zip(names, means, self._coefficients) if wanted}


def expert_load(counts_LE: torch.Tensor, replayed_L2: torch.Tensor | None = None) -> ExpertLoad | None:
    """Load from the number of rows per layer and expert, int64 [L, E]; None if a layer has none.

    `replayed_L2` holds the replayed choices that differ from the router's own, and all replayed ones.
    """
    total_L1 = counts_LE.sum(dim=1, keepdim=True)
    if not total_L1.all():
        return None
    shares_LE = counts_LE.double() / total_L1
    entropy_L = torch.special.entr(shares_LE).sum(dim=1) / math.log(max(2, counts_LE.shape[1]))
    changed, replayed = (0, 0) if replayed_L2 is None else replayed_L2.sum(dim=0).tolist()
    share = changed / replayed if replayed else None
    return ExpertLoad(shares_LE.amax(dim=1).mean().item(), entropy_L.mean().item(), share)
