"""Permanent patches of vLLM, with the reason of each (cluster/patches.py), and one of a live engine (engine.py).

Elsewhere: replacements while an engine starts (host_process.py).
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
from torch import Tensor, nn
from vllm.distributed import parallel_state
from vllm.distributed.aux_output_connector import worker
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention
from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo
from vllm.utils import jit_monitor
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessorOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from hacpo_mega.cluster.patches import Patch
from hacpo_mega.models.families.latent import EPSILON
from hacpo_mega.rollout.cpu.delta_net import in_any_type
from hacpo_mega.rollout.vllm.host_process import keeping_default_group, without_message_queue
from hacpo_mega.rollout.vllm.routing import on_every_rank

Update = Callable[[LogprobsProcessor, LogprobsLists], None]
Allocate = Callable[..., KVCacheBlocks | None]
# Steps of tokens that wait for their answer's end, so that memory stays small however long answers are.
MOST_HELD = 64
ONE_MORE = {"num_lookahead_tokens": 0}  # arguments beside request and number, for a running request


def written_at_once(one_by_one: Update) -> Update:
    """Replacement of LogprobsProcessor's `_update_sample_logprobs`, which still handles all but the plain case.

    All tokens that arrive together are written at once: decode_scheduler.py passes on many. Plain: only the sampled
    token's log-prob, in flat lists, and no detokenisation.
    """

    @wraps(one_by_one)
    def update(processor: LogprobsProcessor, new: LogprobsLists) -> None:
        record = processor.logprobs
        if processor.num_logprobs != 0 or processor.tokenizer is not None or isinstance(record, list):
            one_by_one(processor, new)
            return
        values, start = new.logprobs[:, 0].tolist(), len(record.logprobs)
        record.start_indices += range(start, start + len(values))
        record.end_indices += range(start + 1, start + len(values) + 1)
        record.token_ids += new.logprob_token_ids[:, 0].tolist()
        record.logprobs += values
        record.ranks += new.sampled_token_ranks.tolist()
        record.decoded_tokens += [None] * len(values)
        for value in values:  # one by one, so that the sum rounds as vLLM's does
            processor.cumulative_logprob += value

    return update


def inside_a_block(allocate: Allocate) -> Allocate:
    """Replacement of KVCacheManager's `allocate_slots`, which still handles all but the plain case.

    Plain: a running request gets one token, which neither opens nor fills a block of a cache of full attention. Nothing
    is allocated, freed or hashed then, and vLLM takes 4 us a request and step to find that out.
    """

    @wraps(allocate)
    def allocate_slots(manager: KVCacheManager, request: Request, num_new_tokens: int, **how: Any) -> Any:
        if num_new_tokens == 1 and how == ONE_MORE:
            first, *others = manager.coordinator.single_type_managers
            is_plain = type(first) is FullAttentionManager and not others
            if is_plain and 0 < request.num_computed_tokens % first.block_size < first.block_size - 1:
                return manager.empty_kv_cache_blocks
        return allocate(manager, request, num_new_tokens, **how)

    return allocate_slots


def with_a_name(get: Callable[[Tensor], Callable[..., Any]]) -> Callable[[Tensor], Callable[..., Any]]:
    """Replacement of a reload's `_get_weight_loader`: gives partial functions a name, by which reloads know loaders."""

    @wraps(get)
    def weight_loader(tensor: Tensor) -> Callable[..., Any]:
        loader = get(tensor)
        if isinstance(loader, partial):
            loader.__name__ = loader.func.__name__
        return loader

    return weight_loader


def inspected_here(model: _LazyRegisteredModel) -> _ModelInfo:
    """Replacement of `inspect_model_cls`, which reads facts of a model's class: here in this process."""
    return _ModelInfo.from_model_cls(model.load_model_cls())


def in_one_group(init: Callable[..., None]) -> Callable[..., None]:
    """Replacement of the `__init__` of the CPU's router, which takes sigmoid scores only with groups: adds one."""

    @wraps(init)
    def start(router: CPURouter, *given: Any, **named: Any) -> None:
        init(router, *given, **named)
        if router.scoring_func == "sigmoid" and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    return start


def with_latent_norms(init: Callable[..., None]) -> Callable[..., None]:
    """Replacement of the `__init__` of attention with latents: gives the latents' norms their own epsilon."""

    @wraps(init)
    def start(attention: nn.Module, *given: Any, **named: Any) -> None:
        init(attention, *given, **named)
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if hasattr(attention, name):  # queries have a norm only where they have latents, too
                getattr(attention, name).variance_epsilon = EPSILON

    return start


def for_parts_of_heads(on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of the CPU's rotary embedding: its kernel assumes adjacent heads, which parts of heads are not."""

    @wraps(on_cpu)
    def forward_cpu(rope: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.dim() == 2:  # whole heads, a token's in one row
            return on_cpu(rope, positions, query, key)
        return rope.forward_native(positions, query, key)

    return forward_cpu


class MergedRecords:
    """Replacement of a live output processor's `process_outputs`: merges an answer's tokens into one record at its end.

    vLLM would handle every token of every running answer by itself, in every step. With statistics nothing is merged.
    """

    def __init__(self, one_by_one: Callable[..., OutputProcessorOutput]) -> None:
        self._one_by_one = one_by_one
        self._held: dict[str, list[EngineCoreOutput]] = {}

    def __call__(
        self,
        records: list[EngineCoreOutput],
        engine_core_timestamp: Any = None,
        iteration_stats: Any = None,
        **how: Any,
    ) -> OutputProcessorOutput:
        """Passes on what ended, what brings more than tokens, and what has waited for MOST_HELD steps."""
        if iteration_stats is None:
            records = [merged(self._held.pop(one.request_id)) for one in records if not self._holds(one)]
        return self._one_by_one(records, engine_core_timestamp, iteration_stats, **how)

    def flush(self) -> None:
        """Passes on all held tokens: running answers are complete then."""
        held, self._held = self._held, {}
        self._one_by_one([merged(records) for records in held.values()])

    def _holds(self, record: EngineCoreOutput) -> bool:
        held = self._held.setdefault(record.request_id, [])
        held.append(record)
        is_plain = record.prefill_stats is record.routed_experts is record.new_sampling_mask is None
        return is_plain and record.finish_reason is None and len(held) < MOST_HELD


def merged(records: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The last record of a request, with the tokens and log-probs of all."""
    last = records[-1]
    if len(records) > 1:
        last.new_token_ids = [token for record in records for token in record.new_token_ids]
        if last.new_logprobs is not None:
            columns = zip(*(record.new_logprobs[:3] for record in records), strict=True)
            last.new_logprobs = LogprobsLists(*map(np.concatenate, columns))
    return last


_KEEPING = "the default group is the trainer's; also when an engine that nobody closed is collected"
_QUEUE = "a queue between ranks would unpickle what its sockets bring"
_EXPERTS = "every rank of an engine keeps the routing of its tokens"
_MONITOR = "it watches the whole process: it warns of the trainer's own kernels, or fails them"
_ARRAYS = "log-probs of a step are written as arrays, not as an object a token"
_SLOTS = "most tokens need no new block; the search for one limits the host with 512 running answers"
_LOADERS = "loaders of norms over all heads that ranks share are partial functions, which have no name"
_CLASS = "another process would import vLLM to read the class, and answer with a pickle; this one loads it anyhow"
_ROUTER = "on the CPU it has sigmoids with a bias only for groups of experts, and MiniMax-M2 has no groups"
_LATENTS = "norms of latents have 1e-6, as in the models' own code and in transformers, whatever rms_norm_eps says"
_APART = "on the CPU it rotates the wrong numbers of a head where only a part of the head is to be rotated"
_DELTA = "on the CPU it takes bfloat16 alone, and quickstarts and tests are in float32"

VLLM = (
    Patch(parallel_state, "destroy_distributed_environment", keeping_default_group, _KEEPING, wraps=True),
    Patch(parallel_state, "init_model_parallel_group", without_message_queue, _QUEUE, wraps=True),
    Patch(worker, "get_tp_group", on_every_rank, _EXPERTS),
    Patch(jit_monitor, "activate", lambda **_how: None, _MONITOR),
    Patch(LogprobsProcessor, "_update_sample_logprobs", written_at_once, _ARRAYS, wraps=True),
    Patch(KVCacheManager, "allocate_slots", inside_a_block, _SLOTS, wraps=True),
    Patch(_LazyRegisteredModel, "inspect_model_cls", inspected_here, _CLASS),
    Patch(CPURouter, "__init__", in_one_group, _ROUTER, wraps=True),
    Patch(DeepseekV2MLAAttention, "__init__", with_latent_norms, _LATENTS, wraps=True),
    Patch(RotaryEmbedding, "forward_cpu", for_parts_of_heads, _APART, wraps=True),
    Patch(layerwise, "_get_weight_loader", with_a_name, _LOADERS, wraps=True),
    Patch(gdn_attention, "cpu_gdn_attention_core", in_any_type, _DELTA, wraps=True),
)
