"""The actor: one agent's Megatron model, which scores answers, learns from them, and hands out its weights.

All ranks of a cell call every method with the same samples; all cells of the agent call `learn` together.
Its core is one path, pack -> forward -> `linear_logprob`, shared by scoring and learning: the first update of a step
repeats the scores bit for bit. The scaling of gradients is in train/schedule.py, Adam in optimizer.py. Megatron's start
in a process, with the agent's parallel groups, is at the end of the file.

Elsewhere: advantages and the formulas of the losses (algorithm/), sampling (the engine).

Shapes: R trained rows of a micro-batch, B its samples, H hidden size; t tokens and N trained rows of it on this rank of
cp.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hacpo_kernels import SequenceTerms, linear_logprob
from megatron.core import parallel_state, tensor_parallel
from torch.utils._pytree import tree_map_only

from hacpo_mega.algorithm import GradientProducts, mean_logprobs
from hacpo_mega.cluster.groups.spans import Spans
from hacpo_mega.cluster.machine.device import actor_dtype, send
from hacpo_mega.cluster.patches import apply_patches
from hacpo_mega.config import DataParallelConfig, OptimizerConfig
from hacpo_mega.megatron.checkpoint.sharded_state import load_state, not_finite, read_main_weights, save_state
from hacpo_mega.megatron.model.context_parallel import own_rows, own_tokens, sum_rows
from hacpo_mega.megatron.model.installed import TE_VERSION
from hacpo_mega.megatron.model.model import HiddenStateModel, build_model, lm_head_weight, unwrapped, vocab_start
from hacpo_mega.megatron.model.platform import megatron_platform, one_group_for_equal_ranks
from hacpo_mega.megatron.model.te_layers import chosen_transformer
from hacpo_mega.megatron.patches import MEGATRON
from hacpo_mega.megatron.train.optimizer import ActorOptimizer, OffloadMode
from hacpo_mega.megatron.train.overlap import finish_gather, start_gather
from hacpo_mega.megatron.train.schedule import (
    DATA_PARALLEL,
    NO_TOKEN_COUNT,
    EvenBatches,
    ExpertCounts,
    LastStage,
    accumulate_gradients,
    data_parallel,
    forward_only,
    object_from_last_stage,
    on_device,
    sequence_indices,
    sum_over_cells,
    tensor_from_last_stage,
    update_stats,
)
from hacpo_mega.megatron.weights.lora import adapters_off, attach_adapters
from hacpo_mega.megatron.weights.names import load_hf_weights
from hacpo_mega.megatron.weights.reshard import full_tensors, save_hf
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.lora import Lora
from hacpo_mega.records import MicroBatch, Sample, Score, TokenSequence, UpdateStats
from hacpo_mega.samples.packing import pack, pack_update

# (log-probs of the trained tokens [R], micro-batch on their device) -> (scalar loss, something to report)
LossFn = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Any]]
Packing = Callable[[Sequence[TokenSequence]], Sequence[MicroBatch]]
# A cell's ranks are neighbours: rank = cell * (tp * cp * pp) + (pp_rank * cp + cp_rank) * tp + tp_rank.
RANK_ORDER = "tp-cp-ep-pp-dp"


@dataclass(frozen=True, kw_only=True)
class ActorSpec:
    """Settings with which a folder is trained: layout, precision, memory, optimizer.

    layout           parallel layout of a cell; the `overrides` give the layers of its first and last stage
    total_updates    optimizer steps of the run, which the schedule of the rate follows
    max_positions    longest sequence; default: the model's
    share_prompts    reads a prompt once for all its sequences, where that is possible (local layers, cp 1)
    temperature      of the rollouts: log-probs are of the distribution that was sampled
    recompute        activations that backward computes again (none, mlp, full)
    offload_mode     state that can be offloaded (optimizer.py)
    lora             trains adapters alone (weights/lora.py)
    transformer      layer implementation (auto, local, te; te_layers.py)
    communication    overlap of data-parallel communication with compute (overlap.py)
    overrides        fields of Megatron's TransformerConfig
    dtype            of the weights; default: `actor_dtype`
    timeout_s        bounds every collective of the actor's groups
    """

    layout: Layout
    optimizer: OptimizerConfig
    total_updates: int
    max_tokens_per_microbatch: int
    max_positions: int | None = None
    share_prompts: bool = True
    temperature: float = 1.0
    seed: int = 1
    recompute: str = "none"
    offload_mode: OffloadMode = "nothing"
    lora: Lora | None = None
    transformer: str = "auto"
    communication: DataParallelConfig = DATA_PARALLEL
    overrides: Mapping[str, Any] | None = None
    dtype: torch.dtype | None = None
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class ActorHooks:
    """Callbacks to the owner of an actor.

    spans         records the parts of an update
    on_progress   called for every micro-batch
    reports       named tuples that a loss function reports
    """

    spans: Spans = field(default_factory=Spans)
    on_progress: Callable[[], None] = lambda: None
    reports: Sequence[type] = (SequenceTerms,)


class Actor:
    """A Hugging Face folder as a trainable Megatron model, sharded over tp * cp * pp ranks, replicated over cells."""

    def __init__(self, folder: Path, spec: ActorSpec, hooks: ActorHooks | None = None) -> None:
        """Builds this rank's part over the default process group (the agent's world) and loads `folder`.

        One per process. Raises ValueError for a layout or a folder that the model cannot have.
        """
        self.hooks, layout, lora = hooks or ActorHooks(), spec.layout, spec.lora
        self.architecture = Architecture.from_folder(folder)
        self.folder, self.layout, self.temperature = Path(folder), layout, spec.temperature
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.dtype = spec.dtype or actor_dtype(self.device)
        self.transformer = chosen_transformer(
            "local" if lora is not None and spec.transformer == "auto" else spec.transformer,
            self.architecture,
            dtype=self.dtype,
            on_cuda=cuda,
            version=TE_VERSION,
        )
        # With cp, rows must be in rising order; TransformerEngine and delta nets cannot share prompts.
        can_share = layout.cp == 1 and self.transformer == "local" and self.architecture.delta_net is None
        self.shares_prompts = spec.share_prompts and can_share
        how = {"multiple": layout.tp * layout.cp, "shares_prompts": self.shares_prompts}
        self.pack = partial(pack, max_tokens=spec.max_tokens_per_microbatch, **how)
        self._pack_update = partial(pack_update, **self.pack.keywords)
        ep = layout.ep if self.architecture.has_experts else None
        initialize_parallel(layout.tp, layout.pp, spec.seed, spec.timeout_s, cp=layout.cp, ep=ep)
        with megatron_platform():
            model = self._build(spec)
            self._experts = ExpertCounts(model)
            if lora is not None:
                attach_adapters(model, lora, spec.seed)
            self.model = data_parallel(model, self.hooks.spans, spec.communication)
            self.optimizer = ActorOptimizer(
                self.model, spec.optimizer, spec.total_updates, offload_mode=spec.offload_mode
            )
        read_main_weights(self.model, self.optimizer, self.folder)
        self._reference: list[torch.Tensor] | None = None
        self._saving_group: dist.ProcessGroup | None = None
        self.timeout = timedelta(seconds=spec.timeout_s)

    def _build(self, spec: ActorSpec) -> HiddenStateModel:
        model = build_model(
            self.architecture,
            tp=self.layout.tp,
            pp=self.layout.pp,
            cp=self.layout.cp,
            ep=self.layout.ep,
            dtype=self.dtype,
            max_positions=spec.max_positions or self.architecture.max_positions,
            recompute=spec.recompute,
            transformer=self.transformer,
            overrides=dict(spec.overrides or {}),
        )
        load_hf_weights(model, self.folder)
        return model

    # ---- scoring

    def score(self, sequences: Sequence[TokenSequence]) -> list[Score]:
        """Log-probs of the trained tokens of every sequence and their mean, on all ranks of the cell.

        The sum is divided as in the objective, in the same arithmetic: if own answers are scored together with the
        others of their update, before it, their ratio in that update is exactly 1. Without trained tokens the score is
        0, the empty sum.
        """
        scores = [Score(0.0, np.zeros(0, dtype=np.float32))] * len(sequences)
        for batch, logprob_R in self._forward(sequences):
            length_B = batch.row_cu_seqlens_B.diff()
            mean_B = mean_logprobs(logprob_R, batch.row_cu_seqlens_B)
            parts = logprob_R.cpu().split(length_B.tolist())
            for place, mean, part in zip(sequence_indices(sequences, batch), mean_B.tolist(), parts, strict=True):
                scores[place] = Score(mean, part.numpy())
        return scores

    def token_logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Log-prob of every trained token of every sequence, float32 [num_trained] each, on all ranks of the cell."""
        return [score.token_logprobs for score in self.score(sequences)]

    def _forward(self, sequences: Sequence[TokenSequence]) -> list[tuple[MicroBatch, torch.Tensor]]:
        """Every micro-batch with the log-probs [R] of its rows, which the last pipeline stage sends to the others."""
        batches = self.pack(sequences)
        with megatron_platform():
            logprobs = forward_only(self.model, EvenBatches(batches, self.hooks.on_progress), self._token_logprobs)
        if not logprobs:
            logprobs = [torch.empty(len(batch.rows_R), device=self.device) for batch in batches]
        return [(batch, tensor_from_last_stage(tensor)) for batch, tensor in zip(batches, logprobs, strict=True)]

    def _token_logprobs(self, hidden_tH: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Log-probs of the trained rows, fp32 [R], from hidden states [t, H], without logits. Last stage only."""
        finish_gather(self.model)  # no module's pre-forward hook waits for the head
        weight_VH, tokens = lm_head_weight(self.model), own_tokens(len(batch.tokens_T))
        own = own_rows(batch.rows_R, tokens)
        (rows_N,) = send((batch.rows_R[own] - tokens.start,), self.device)
        logprob_N = linear_logprob(
            hidden_tH.index_select(0, rows_N),
            weight_VH,
            batch.targets_R[own],
            vocab_start=vocab_start(self.model),
            vocab_size=self.architecture.vocab_size,
            temperature=self.temperature,
            softcap=self.architecture.softcap,
            group=parallel_state.get_tensor_model_parallel_group() if self.layout.tp > 1 else None,
            # A bf16 weight's gradient would be rounded to bf16 before DDP adds it to its float32 buffer.
            fuse_main_grad=weight_VH.requires_grad and weight_VH.dtype != torch.float32,
        )
        return sum_rows(logprob_N, own, len(batch.rows_R))

    # ---- learning

    def learn(self, samples: Sequence[TokenSequence], loss_fn: LossFn, packing: Packing | None = None) -> UpdateStats:
        """One optimizer update from this cell's share of it. Collective over the agent; `samples` may be empty.

        `loss_fn` maps the log-probs [R] of a micro-batch's trained tokens to (loss, report). Losses are summed over
        micro-batches and cells and divided by nothing (train/schedule.py), so it must divide by a count of the whole
        update. A loss or a gradient that is not finite anywhere skips the update everywhere. `packing` makes the
        micro-batches; the default packs own answers apart from others', as `score` packs them; `pack` does not.
        """
        batches = (packing or self._pack_update)(samples)
        with megatron_platform():
            self._experts.begin(batches)
            with self.hooks.spans.span("forward and backward"):
                seen = accumulate_gradients(
                    self.model, EvenBatches(batches, self.hooks.on_progress), self._loss_of(loss_fn)
                )
            loss = sum_over_cells(sum(loss for loss, _ in seen), self.device)
            reports = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), [report for _, report in seen])
            loss, reports = object_from_last_stage((loss, reports), self.hooks.reports, self.device)
            with self.hooks.spans.span("optimizer"):
                finish_gather(self.model)  # a cell without samples has not waited yet
                step = self.optimizer.step(loss)
                start_gather(self.model)
            experts = self._experts.load()
        return update_stats(batches, loss, reports, step, experts)

    def learn_supervised(self, sequences: Sequence[TokenSequence], num_trained_tokens: int) -> UpdateStats:
        """One update of cross-entropy, nats per token over the `num_trained_tokens` of all cells together."""

        def cross_entropy(logprob_R: torch.Tensor, _batch: MicroBatch) -> tuple[torch.Tensor, None]:
            return -logprob_R.sum() / num_trained_tokens, None

        return self.learn(sequences, cross_entropy, self.pack)

    def _loss_of(self, loss_fn: LossFn) -> LastStage:
        """Function of the last stage: hidden states [t, H] to the loss, and (loss, report) for the caller."""

        def last_stage(hidden_tH: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, Any]:
            loss, report = loss_fn(self._token_logprobs(hidden_tH, batch), on_device(batch, self.device))
            return loss, NO_TOKEN_COUNT, (loss.detach(), report)

        return last_stage

    def gradient_products(self, groups: Sequence[Sequence[Sample]], loss_fn: LossFn) -> GradientProducts:
        """Squared norms of the gradients of groups of samples, and their inner products with the first.

        Costs a forward and a backward per group, and one more copy of this rank's shard of the gradient, fp32. The next
        update overwrites the gradients left in the buffers. Collective over the agent: every cell gives as many groups,
        of its own samples, any of them empty.
        """
        first: list[torch.Tensor] = []
        found = []
        with megatron_platform():
            for place, samples in enumerate(groups):
                batches = EvenBatches(self._pack_update(samples), self.hooks.on_progress)
                accumulate_gradients(self.model, batches, self._loss_of(loss_fn))
                present = self.optimizer.counted_gradients()
                if place == 0:
                    first = [gradient.clone() for gradient in present]
                found.append(torch.stack([self._dot(present, present), self._dot(first, present)]))
            squares, products = self.optimizer.sum_over_model(torch.stack(found)).T.tolist()
        return GradientProducts(tuple(squares), tuple(products))

    def _dot(self, first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
        """Inner product of lists of fp32 tensors, summed in float64."""
        terms = ((a * b).sum(dtype=torch.float64) for a, b in zip(first, second, strict=True))
        return sum(terms, start=torch.zeros((), dtype=torch.float64, device=self.device))

    # ---- reference policy

    def keep_reference(self) -> None:
        """Keeps a copy of the present parameters, on the CPU, as the policy of `reference_token_logprobs`.

        Under LoRA no copy is needed: the reference is the model without its adapters.
        """
        if unwrapped(self.model).lora is None:
            self._reference = self._copy_of_parameters()

    def reference_token_logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """`token_logprobs` under the reference parameters; the present ones are restored bit for bit."""
        if (model := unwrapped(self.model)).lora is not None:
            with adapters_off(model):
                return self.token_logprobs(sequences)
        assert self._reference is not None, "keep_reference() comes first"
        present = self._copy_of_parameters()
        try:
            self._set_parameters(self._reference)
            return self.token_logprobs(sequences)
        finally:
            self._set_parameters(present)

    def _copy_of_parameters(self) -> list[torch.Tensor]:
        finish_gather(self.model)
        return [parameter.detach().to("cpu", copy=True) for parameter in self.model.parameters()]

    @torch.no_grad()
    def _set_parameters(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.copy_(value)

    # ---- weights

    def weights(self, only: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the whole model (or those in `only`) by its Hugging Face name, each of its full shape.

        Collective over the cell, or all cells that share experts.
        """
        finish_gather(self.model)
        return full_tensors(self.model, sent=self.hooks.spans.sent, only=only)

    def save(self, folder: Path, *, copies: bool = False) -> tuple[dict[str, int], Callable[[], None]]:
        """Starts a checkpoint: the counts for `load`, and a function that writes weights and optimizer to a folder.

        With `copies` the actor may learn on meanwhile: the present state is written. Collective over the agent.
        """
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo", timeout=self.timeout)
        write = save_state(self.model, self.optimizer, folder, self._saving_group, copies=copies)
        return {"num_updates": self.optimizer.num_updates, "num_applied": self.optimizer.num_applied}, write

    def not_finite(self) -> str | None:
        """First tensor of this rank's share of the state that holds NaN or infinity; None if all are finite."""
        return not_finite(self.model, self.optimizer)

    def load(self, folder: Path, *, num_updates: int, num_applied: int) -> None:
        """Loads what `save` wrote; the kept reference stays. Collective over the agent."""
        finish_gather(self.model)  # a pending gather would bring the old weights
        load_state(self.model, self.optimizer, folder, num_updates=num_updates, num_applied=num_applied)

    def save_hf(self, folder: Path, dtype: torch.dtype | None = None, added_end: int | None = None) -> None:
        """Writes a Hugging Face folder, by default in the model's dtype. Collective over the agent; its rank 0 writes.

        `added_end` becomes one of the end tokens that its generation_config.json names. Other cells do not wait for it.
        OSError on the first rank, and on no other, if it cannot write.
        """
        finish_gather(self.model)
        if parallel_state.get_data_parallel_rank() < self.layout.block_cells:
            dtype = dtype or self.model.config.params_dtype
            save_hf(self.model, self.folder, folder, dtype, added_end=added_end)


def initialize_parallel(
    tp: int, pp: int, seed: int, timeout_s: float = 1800.0, *, cp: int = 1, ep: int | None = None
) -> None:
    """Creates Megatron's groups over the current default process group (one agent's world), and its random streams.

    Rank order is RANK_ORDER; data parallelism takes the rest of the world. `ep` ranks share a layer's experts, those of
    one cell or of several neighbouring ones; None means no experts. `timeout_s` bounds every collective of these
    groups. Raises ValueError if tp * cp * pp does not divide the world. Gloo twins of the groups are not made:
    optimizers take `use_gloo_process_groups=False`.
    """
    world_size = dist.get_world_size()
    if world_size % (cell := tp * cp * pp):
        raise ValueError(f"tp * cp * pp = {tp} * {cp} * {pp} = {cell} does not divide the agent's {world_size} ranks")
    apply_patches(MEGATRON)
    with megatron_platform(), one_group_for_equal_ranks():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            # Megatron makes expert groups, too: at this size their pipelines have equal ranks. See `_share_experts`.
            expert_model_parallel_size=cp,
            order=RANK_ORDER,
            distributed_timeout_minutes=timeout_s / 60.0,  # a timedelta is made of it, which takes parts of minutes
            create_gloo_process_groups=False,
        )
        if ep is not None:
            _share_experts(tp * cp, pp, ep, timedelta(seconds=timeout_s))
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _share_experts(ranks: int, pp: int, ep: int, timeout: timedelta) -> None:
    """Replaces Megatron's expert groups by groups in which `ep` ranks of a stage share experts.

    Megatron's order of ranks spreads experts over exactly all ranks of a stage of a cell. Here every `ep` neighbours
    share them, among the ranks that the stage has in all cells, `ranks` in each. Ranks with the same experts, in this
    cell and in others, sum their gradients and share their optimizer.
    """
    names, cells = parallel_state, range(0, dist.get_world_size(), ranks * pp)
    for stage in range(pp):
        line = [cell + stage * ranks + place for cell in cells for place in range(ranks)]
        for share in (line[first : first + ep] for first in range(0, len(line), ep)):
            group = names.create_group(share, timeout=timeout, group_desc="EXPERT_MODEL_PARALLEL_GROUP")
            if dist.get_rank() in share:
                names._EXPERT_MODEL_PARALLEL_GROUP, names._EXPERT_MODEL_PARALLEL_RANKS = group, share
                names._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = group
        for same in (line[place::ep] for place in range(ep)):
            group = names.create_group(same, timeout=timeout, group_desc="EXPERT_DATA_PARALLEL_GROUP")
            if dist.get_rank() in same:
                names._EXPERT_DATA_PARALLEL_GROUP = names._INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = group
