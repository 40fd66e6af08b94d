"""Routing of an engine's tokens to experts, as the actor replays it (samples/routing.py).

On CUDA vLLM's second model runner returns it with an answer (`enable_return_routed_experts`), including cached prefixes
and tokens that were read twice. The first runner, the only one on the CPU, cannot: there vLLM's routers report it to a
capturer (`bind_routed_experts_capturer`), which stores it like keys and values, by the slots of their cache. So a
cached prefix has the routing of the request that computed it, preempted tokens are written again when they are read
again, a prompt may be read in parts, and routing is dropped with the cache (new weights). An answer's last token is
never read, so it has no routing.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from vllm import LLM, RequestOutput
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.rollout.vllm.engine_stream_guard import worker_of
from hacpo_mega.samples.routing import fit_rows, routing_type, unknown_expert


class ReturnedRouting:
    """Routing that vLLM's second runner returns with an answer."""

    summary = "what vLLM's second model runner returns"

    def __init__(self, architecture: Architecture) -> None:
        self._none = no_rows(architecture)

    def of(self, output: RequestOutput) -> np.ndarray:
        """Routing of an ended request, in the form of records.Completion."""
        rows = output.outputs[0].routed_experts
        return fit_rows(self._none if rows is None else rows.astype(self._none.dtype), num_read(output))


class SlotRouting:
    """Routing stored in the KV-cache slots of vLLM's first runner, on the CPU."""

    summary = "what vLLM's routers say, kept by the slots of its cache"

    def __init__(self, llm: LLM, architecture: Architecture) -> None:
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._runner, self._none = worker_of(llm).model_runner, no_rows(architecture)
        cache = self._runner.kv_cache_config
        # Layers with a window have blocks of their own, which are freed as it moves on.
        self._group = [isinstance(each.kv_cache_spec, FullAttentionSpec) for each in cache.kv_cache_groups].index(True)
        group = cache.kv_cache_groups[self._group]
        self._layer = group.layer_names[0]
        self._block_size = group.kv_cache_spec.block_size
        shape = cache.num_blocks * self._block_size, *self._none.shape[1:]
        self._slots = np.full(shape, unknown_expert(self._none.dtype), self._none.dtype)
        bind_routed_experts_capturer(self._runner.get_model(), self)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Called by the router of a layer in every forward, with the experts of its tokens [n, k]."""
        if mapping := get_forward_context().slot_mapping:  # there is none in a warm-up
            slots = mapping[self._layer][: len(topk_ids)].numpy()
            is_token = slots >= 0
            self._slots[slots[is_token], layer_id] = topk_ids.numpy()[is_token]

    def of(self, output: RequestOutput) -> np.ndarray:
        """Routing of a request that has just ended or is about to be cut: no other request has its blocks yet."""
        names = (name for name in self._runner.requests if name.partition("-")[0] == output.request_id)
        if (name := next(names, None)) is None:  # it has never run
            return fit_rows(self._none, num_read(output))
        known, request = num_read(output), self._scheduler.requests.get(name)
        if request is not None:  # which may have been preempted
            known = min(known, request.num_computed_tokens)
        blocks = np.array(self._runner.requests[name].block_ids[self._group], np.int64)
        slots = (blocks[:, None] * self._block_size + np.arange(self._block_size)).reshape(-1)
        return fit_rows(self._slots[slots[:known]], num_read(output))


Routing = ReturnedRouting | SlotRouting


def routing_of(llm: LLM, folder: Path) -> Routing:
    """Routing recorder of a running vLLM engine with the model of a folder."""
    architecture = Architecture.from_folder(folder)
    if llm.llm_engine.vllm_config.aux_output_config.enable_return_routed_experts:
        return ReturnedRouting(architecture)
    return SlotRouting(llm, architecture)


def no_rows(architecture: Architecture) -> np.ndarray:
    """Routing of zero tokens."""
    shape = 0, architecture.num_layers, architecture.experts_per_token
    return np.empty(shape, routing_type(architecture.num_experts))


def num_read(output: RequestOutput) -> int:
    """Number of prompt and answer tokens that the model reads: all but the last one."""
    return len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1


def on_every_rank() -> SimpleNamespace:
    """Replacement of the engine's rank group for vLLM's auxiliary outputs: every rank counts as the first.

    vLLM returns them to the first rank alone, whose scheduler asks for them. Here every rank has a scheduler
    (external_launcher) and the same routing.
    """
    return SimpleNamespace(is_first_rank=True)
