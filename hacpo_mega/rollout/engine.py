"""The rollout engine: a live vLLM inside the trainer's own process, on CUDA and on CPU with the same code.

Every rank of an agent builds one `Engine`. `tensor_parallel_size` neighbouring ranks of the agent's default process
group form one vLLM; further ranks are independent replicas. New weights are loaded into the running model, with no file
and no second process between trainer and engine. Only rollout/ imports vllm.

Elsewhere: prompts as text (the engine sees token ids and never decodes), and when it is awake (agent/devices.py).

environment.py sets these variables before torch and vllm are imported:

    VLLM_ENABLE_V1_MULTIPROCESSING=0   the engine must live in this process; without it the constructor refuses
    VLLM_LOGGING_LEVEL                 ERROR on the CPU, where vLLM warns of all that is not CUDA; WARNING on CUDA
    VLLM_ALLREDUCE_USE_FLASHINFER=0    CUDA only: else the all-reduce kernel of an engine depends on PATH
    VLLM_USE_FLASHINFER_SAMPLER=0      CUDA only: it takes no request with a seed
    TORCHDYNAMO_DISABLE=1              CPU only: vLLM would compile a tiny function for 18 s at the first log-probs
    OMP_NUM_THREADS                    CPU only: cores per rank. In one process vLLM binds no threads to cores by itself
"""

import enum
import gc
import math
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
from vllm import config as vllm_config
from vllm.device_allocator import get_mem_allocator_instance
from vllm.distributed import parallel_state

from hacpo_mega.config.checks.pass_through import require_accepted
from hacpo_mega.models.families.families import is_tied
from hacpo_mega.models.files.folder import named_ends
from hacpo_mega.models.files.stacked_experts import joined_experts, unpacked_tensor
from hacpo_mega.models.files.weight_files import StoredTensor, published_names, stacks_experts, stored_tensors
from hacpo_mega.models.sharding.shards import stack_name
from hacpo_mega.records import Completion, Stop
from hacpo_mega.rollout.cpu.decode_scheduler import DecodeScheduler
from hacpo_mega.rollout.cpu.delta_net import register_text_model
from hacpo_mega.rollout.vllm.engine_loop import (
    EngineLoop,
    ServeTally,
    TurnLimits,
    TurnRequest,
    TurnSource,
    completion_of,
    cut_requests,
    odd_row_counts,
    of_first_rank,
)
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.engine_stream_guard import EngineStreamGuard, finish_steps, worker_of
from hacpo_mega.rollout.vllm.host_process import (
    free_memory_unmeasured,
    has_expandable_segments,
    joined_to_default_group,
    require_process,
    starting_vllm,
)
from hacpo_mega.rollout.vllm.patches import VLLM, MergedRecords
from hacpo_mega.rollout.vllm.routing import Routing, routing_of
from hacpo_mega.rollout.vllm.row_noise import RowNoise
from hacpo_mega.rollout.weights.engine_weights import (
    EngineWeights,
    Receiver,
    noting_names,
    noting_sinks,
    require_names,
    take_sinks,
    without_reload_warnings,
)
from hacpo_mega.rollout.weights.expert_weights import converts_experts, pack_at_every_load
from hacpo_mega.rollout.weights.held_weights import ABSORBED, HeldPart, absorbs, held_parts

WEIGHTS, CACHE = "weights", "kv_cache"
# (index among the prompts of the call, answer)
OnAnswer = Callable[[int, Completion], None]


class Memory(enum.Enum):
    """Engine state in device memory: nothing, weights alone, or weights and KV cache."""

    ASLEEP = "asleep"
    WEIGHTS = "weights"
    AWAKE = "awake"


def _folder_weights(folder: Path, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors `names` of a folder's text model, one at a time, file by file."""
    stored = stored_tensors(folder)
    with ExitStack() as stack:
        opened = cache(lambda file: stack.enter_context(safe_open(folder / file, framework="pt")))

        def read(tensor: StoredTensor) -> torch.Tensor:
            whole = opened(tensor.file).get_slice(tensor.name)
            return whole[:] if tensor.expert is None else whole[tensor.expert]

        for name in sorted(names, key=lambda name: (stored[name].file, name)):
            tensor = stored[name]
            yield name, unpacked_tensor(tensor, read) if tensor.is_packed else read(tensor)


def require_options(options: Mapping[str, Any], owner: str = "") -> None:
    """ValueError, one line, for an engine argument (`agents.vllm`) that vLLM would refuse."""
    tables = [kind.__pydantic_fields__ for kind in vars(vllm_config).values() if hasattr(kind, "__pydantic_fields__")]
    require_accepted(options, {field.name: field.type for field in fields(EngineArgs)}, tables, owner)


class Engine:
    """A live vLLM: samples answers, takes new weights, sleeps while the actor trains.

    All ranks of an engine call every method in lockstep with equal arguments and get equal results.
    """

    def __init__(self, spec: EngineSpec, on_progress: Callable[[], None] = lambda: None) -> None:
        """Builds the engine and loads the weights of its folder. Collective over the default process group.

        `on_progress` is called before every engine step (one decoded token per running request).
        Raises ValueError for an option that this project decides itself, and if the process cannot host an engine.
        """
        require_options(spec.options)
        require_process(spec.tensor_parallel_size)
        self._on_cuda, self._can_sleep = torch.cuda.is_available(), spec.can_sleep
        self._shares_device, self.max_model_len = spec.agents_on_device > 1, spec.max_model_len
        arguments = spec.vllm_arguments(
            on_cuda=self._on_cuda,
            visible_devices=torch.cuda.device_count(),
            expandable_segments=has_expandable_segments(),
        )
        if not self._on_cuda:
            arguments.setdefault("scheduler_cls", DecodeScheduler)
            if spec.delta_net_model is not None:
                register_text_model(spec.delta_net_model)
        self.eos_ids = named_ends(spec.model)[1] if spec.eos_ids is None else tuple(spec.eos_ids)
        self._names = published_names(spec.model, tied=is_tied(spec.model))
        self._memory, self._is_loaded = Memory.AWAKE, not spec.random_weights
        self._on_progress, self._running, self._is_serving = on_progress, None, False
        with starting_vllm(VLLM), joined_to_default_group():
            self._guard = EngineStreamGuard(partial(LLM, **arguments))
        with self._guard.open() as llm:
            self._step, llm.llm_engine.step = llm.llm_engine.step, self._watched_step
            processor = llm.llm_engine.output_processor
            processor.process_outputs = MergedRecords(processor.process_outputs)
            config, runner = llm.llm_engine.vllm_config, worker_of(llm).model_runner
            converts = converts_experts(runner.get_model())
            if not self._on_cuda:
                pack_at_every_load(runner.get_model())
                runner.sampler.topk_topp_sampler.forward = RowNoise(runner)
            self.routing = routing_of(llm, spec.model) if spec.returns_routing else None
            self.turn_limits = TurnLimits(config.model_config.get_vocab_size(), self.max_model_len)
            dropped_at_sleep = pooled_weights() if self._on_cuda and self._can_sleep else []
            self._kept = KeptTensors(runner.get_model(), dropped_at_sleep)
        self._tensor_parallel_size = spec.tensor_parallel_size
        # True if the engine holds weights in another form than they are published in.
        self.quantizes = config.quant_config is not None or converts
        self._has_tied_embeddings = bool(getattr(config.model_config.hf_config, "tie_word_embeddings", False))
        if spec.loads_itself and not spec.random_weights:
            self.load(_folder_weights(spec.model, self._names))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        return_logprobs: bool = False,
        lengths: Sequence[int] | None = None,
        on_answer: OnAnswer | None = None,
        is_unwanted: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """One answer to every prompt (token ids), in order; `temperature` 0 is greedy.

        An answer is a function of weights, prompt and seed: other requests in the batch change it by rounding alone.
        With `lengths` every answer has that many tokens, and the last one ends it, whatever was sampled there.
        `on_answer` is called for each answer as it ends. Once `is_unwanted` returns true on the engine's first rank,
        running answers are cut with Stop.CUT.
        Raises ValueError if a prompt and `max_tokens` exceed max_model_len, RuntimeError unless awake and loaded.
        """
        assert len(prompts) == len(seeds), (len(prompts), len(seeds))
        self._require(Memory.AWAKE, "generate", needs_weights=True)
        for index, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.max_model_len - max_tokens:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; with max_tokens {max_tokens} the engine (max_model_len "
                    f"{self.max_model_len}) takes 1 to {self.max_model_len - max_tokens}: shorten prompts or answers"
                )
        sampling = [
            TurnRequest(
                "", (), seed, length or max_tokens, temperature=temperature, return_logprobs=return_logprobs
            ).sampling(self.eos_ids, min_tokens=length)
            for seed, length in zip(seeds, lengths or [0] * len(seeds), strict=True)
        ]
        with self._guard.open() as llm:
            running = self._running = RunningAnswers(
                llm,
                len(prompts),
                on_answer,
                None if lengths is None else self.eos_ids[0],
                is_unwanted and of_first_rank(is_unwanted, self._tensor_parallel_size),
                self.routing if return_logprobs else None,
            )
            try:
                outputs = _outputs(llm, prompts, sampling)
            finally:
                self._running = None
        return [running.completion(output) for output in outputs]

    def serve(self, source: TurnSource | None) -> ServeTally:
        """Answers the turns of `source` until it is done; they join and leave while others run.

        The first rank of the engine asks its source, and the others may give None. A turn alone is answered as
        `generate` answers it. Nothing else may use the engine meanwhile. An error that ends the loop is reported to the
        source, and raised. Raises RuntimeError unless awake and loaded.
        """
        self._require(Memory.AWAKE, "serve", needs_weights=True)
        self._is_serving = True
        try:
            with self._guard.open() as llm:
                loop = EngineLoop(
                    llm,
                    source,
                    group=parallel_state.get_tp_group().cpu_group if self._tensor_parallel_size > 1 else None,
                    limits=self.turn_limits,
                    eos_ids=self.eos_ids,
                    routing=self.routing,
                    needs_companion=self.odd_row_counts == {1},
                    on_progress=self._on_progress,
                )
                return loop.run()
        finally:
            self._is_serving = False

    @cached_property
    def odd_row_counts(self) -> set[int] | None:
        """Numbers of rows in a step with which layers round otherwise than with many, on the CPU (engine_loop.py).

        Empty or {1}: the order in which turns arrive changes no bit. None on CUDA, where nothing is measured, and with
        experts, of which each gets rows of its own.
        """
        if self._on_cuda:
            return None
        with self._guard.open() as llm:
            return odd_row_counts(worker_of(llm).get_model())

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs of every token after the first, float32 nats at temperature 1: arrays [len(sequence) - 1].

        Raises ValueError for a sequence that is shorter than 2 or leaves no room for one more token.
        """
        self._require(Memory.AWAKE, "logprobs", needs_weights=True)
        for index, tokens in enumerate(sequences):
            if not 2 <= len(tokens) < self.max_model_len:
                raise ValueError(
                    f"sequence {index} has {len(tokens)} tokens; the engine (max_model_len {self.max_model_len}) "
                    f"scores 2 to {self.max_model_len - 1}, since it always samples one more"
                )
        scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        with self._guard.open() as llm:
            outputs = _outputs(llm, sequences, [scoring] * len(sequences))
        return [np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32) for output in outputs]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights of the live model by (Hugging Face name, full tensor of its shape) pairs.

        Every rank of the engine is given every full tensor and keeps its own shard. A yielded tensor must keep its
        value until this returns: vLLM holds on to it until its layer is complete. Cached prefixes, which the old
        weights computed, are dropped.
        Raises ValueError if the names are not those of the model folder, RuntimeError while asleep.
        """
        self._require(Memory.WEIGHTS, "load", needs_weights=False)
        given: set[str] = set()
        self._is_loaded = False  # until all weights are written
        with self._guard.open() as llm:
            self._load(llm, noting_names(weights, given, packs_head=self._packs_head()))
            _drop_prefixes(llm)
        require_names(given, self._names)
        self._is_loaded = True

    def weights(self, published: Mapping[str, tuple[int, ...]]) -> EngineWeights:
        """Destination of every part of the published tensors (name -> shape), recorded from vLLM's own loaders."""
        self._require(Memory.AWAKE, "weights", needs_weights=False)
        with self._guard.open() as llm:
            config = llm.llm_engine.vllm_config.model_config
            return EngineWeights.recorded(worker_of(llm).get_model(), published, config)

    @contextmanager
    def receiving(self, weights: EngineWeights) -> Iterator[Receiver]:
        """Context of a weight sync, in which every part is written once. Drops the old weights' cached prefixes.

        RuntimeError if a part was not written, or while asleep.
        """
        self._require(Memory.WEIGHTS, "receiving", needs_weights=False)
        self._is_loaded = False  # until all weights are written
        with self._guard.open() as llm, torch.inference_mode():
            receiver = Receiver(weights, partial(self._reload, llm))
            yield receiver
            _drop_prefixes(llm)
        if receiver.missing:
            raise RuntimeError(f"{len(receiver.missing)} parameters were not published, first {receiver.missing[:4]}")
        self._is_loaded = True

    def _reload(self, llm: LLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with without_reload_warnings():  # about layers that `weights` does not name
            self._load(llm, noting_names(weights, set(), packs_head=self._packs_head()))

    def _load(self, llm: LLM, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if not stacks_experts(self._names):
            worker_of(llm).reload_weights(weights_iterator=weights)
            return
        sinks: dict[str, torch.Tensor] = {}
        worker_of(llm).reload_weights(weights_iterator=joined_experts(noting_sinks(weights, sinks)))
        take_sinks(worker_of(llm).get_model(), sinks)

    def _packs_head(self) -> bool:
        return self._has_tied_embeddings and not self._on_cuda

    @contextmanager
    def held(self) -> Iterator[list[HeldPart]]:
        """Context with the tensors that the engine multiplies with."""
        self._require(Memory.WEIGHTS, "held", needs_weights=True)
        with self._guard.open() as llm:
            model = worker_of(llm).get_model()
            # A matrix that the folder holds fused is published fused, whatever else vLLM could take.
            stored = {name.split(".")[-2] for name in self._names if name.count(".")}
            fused = {layer: parts for layer, parts in model.packed_modules_mapping.items() if layer not in stored}
            parts = held_parts(model, fused, self._has_tied_embeddings)
            mapper = getattr(model, "hf_to_vllm_mapper", None)
            # vLLM's Hy3 has a router without a layer around it.
            to_vllm = (lambda name: name.replace(".router.gate.", ".gate.")) if mapper is None else mapper._map_name
            vllm_names = {name: to_vllm(name) for name in self._names}
            published = {stack_name(name) for name in self._names}
            by_vllm = {stack_name(other): stack_name(name) for name, other in vllm_names.items() if other is not None}
            by_vllm |= {name: name for name in published}
            yield [replace(part, name=by_vllm.get(part.name, part.name)) for part in parts]

    def sleep(self) -> None:
        """Frees the device memory (weights and cache are dropped, not saved) and drops cached prefixes.

        On CPU vLLM cannot free memory: only the state changes. Raises RuntimeError if asleep already.
        """
        assert self._can_sleep, "an engine with can_sleep = False keeps its memory"
        self._require(Memory.WEIGHTS, "sleep", needs_weights=False)
        with self._guard.open() as llm:
            _drop_prefixes(llm)
            if self._on_cuda:
                self._kept.save()
                with free_memory_unmeasured() if self._shares_device else nullcontext():
                    llm.sleep(level=2)
        self._is_loaded = False
        self._memory = Memory.ASLEEP

    def wake(self, *, cache: bool = True) -> None:
        """Takes device memory again; the weights must then be published before the next answer.

        `cache=False` wakes the weights alone, so that `load` can run while the actor still fills the device; a second
        `wake()` brings the KV cache. If the device lacks the memory, the engine stays as asleep as it was.
        Raises RuntimeError if awake already.
        """
        if self._memory is Memory.AWAKE:
            raise RuntimeError("the engine is awake: wake() needs a sleep() before it")
        parts = [WEIGHTS] if self._memory is Memory.ASLEEP else []
        parts += [CACHE] if cache else []
        with self._guard.open() as llm:
            if self._on_cuda and parts:
                take_memory(llm, parts)
                if WEIGHTS in parts:
                    self._kept.restore()
            self._memory = Memory.AWAKE if cache else Memory.WEIGHTS
            if self._on_cuda and cache:
                # Woken memory has arbitrary content. Attention gives the unused places of a block, behind a sequence's
                # last token, weight zero, and a kernel that multiplies zero by NaN returns NaN.
                with torch.inference_mode():
                    for layer in worker_of(llm).model_runner.kv_caches:
                        layer.zero_()

    def close(self) -> None:
        """Shuts vLLM down and frees its memory. The default process group stays the caller's."""
        self._guard.close()

    @property
    def is_asleep(self) -> bool:
        """True if neither weights nor cache are on the device."""
        return self._memory is Memory.ASLEEP

    def _require(self, memory: Memory, verb: str, *, needs_weights: bool) -> None:
        allowed = {Memory.AWAKE, memory}
        if self._memory not in allowed:
            raise RuntimeError(
                f"{verb}() needs the engine {memory.value}, it is {self._memory.value}: call wake() first"
            )
        if self._is_serving:
            raise RuntimeError(f"{verb}() while the engine serves turns: its source must be done first")
        if needs_weights and not self._is_loaded:
            raise RuntimeError(
                f"{verb}() needs weights, which are not there after sleep or a random start: call load()"
            )

    def _watched_step(self) -> list[RequestOutput]:
        self._on_progress()
        outputs = self._step()
        return outputs if self._running is None else self._running.after_step(outputs)


class KeptTensors:
    """An engine's tensors that sleep drops and that neither vLLM nor a weight sync brings back.

    At level 2 vLLM drops all that was allocated with the model, and restores buffers alone. Kernels' workspaces are
    neither buffers nor parameters: MiniMax-M2's norms over ranks hold addresses of their peers in one.
    """

    def __init__(self, model: nn.Module, allocations: Iterable[tuple[int, int]]) -> None:
        """Finds the process's tensors in these allocations (address, bytes) that `model` does not name."""
        named = {tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())}
        # Attention with latents makes these anew at each weight sync.
        named |= {getattr(one, name).data_ptr() for one in model.modules() if absorbs(one) for name in ABSORBED}
        spans = sorted((start, start + size) for start, size in allocations)

        def is_dropped(tensor: torch.Tensor) -> bool:
            address = _address(tensor)
            index = bisect(spans, (address, math.inf)) - 1
            return address not in named and index >= 0 and address < spans[index][1]

        objects = gc.get_objects() if spans else ()
        self._tensors = [one for one in objects if type(one) is torch.Tensor and is_dropped(one)]
        self._saved: list[torch.Tensor] = []

    def save(self) -> None:
        """Copies them to the host."""
        self._saved = [tensor.to("cpu", copy=True) for tensor in self._tensors]

    def restore(self) -> None:
        """Writes them where they were: kernels and graphs have their addresses."""
        with torch.inference_mode():
            for tensor, saved in zip(self._tensors, self._saved, strict=True):
                tensor.copy_(saved)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()  # 0 for an empty one
    except RuntimeError:  # sparse, or left from tracing: no storage
        return 0


def pooled_weights() -> list[tuple[int, int]]:
    """(address, bytes) of the memory that vLLM's allocator made with the model, which sleep drops."""
    allocations = get_mem_allocator_instance().pointer_to_data.items()
    return [(address, data.handle[1]) for address, data in allocations if data.tag == WEIGHTS]


def take_memory(llm: LLM, parts: Sequence[str]) -> None:
    """Wakes WEIGHTS, CACHE or both from level 2; after an error none of these `parts` is on the device.

    vLLM would count them as asleep then, and would never free what it had mapped before memory ran out.
    """
    try:
        llm.wake_up(tags=list(parts))
    except BaseException:
        worker = worker_of(llm)
        if WEIGHTS in parts:
            worker.sleep_mode_backend.suspend(level=2)  # the worker's own sleep would read the weights' buffers
        else:
            worker.discard(tuple(parts))
        raise


def _drop_prefixes(llm: LLM) -> None:
    """Drops cached prefixes, which the old weights have computed. RuntimeError while a request still uses one."""
    if not llm.reset_prefix_cache():
        num_running = llm.llm_engine.get_num_unfinished_requests()
        raise RuntimeError(f"{num_running} requests still use prefixes that the old weights have computed: abort them")


def _outputs(llm: LLM, prompts: Sequence[Sequence[int]], sampling: list[SamplingParams]) -> list[RequestOutput]:
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(requests, sampling, use_tqdm=False) if requests else []
    finish_steps(llm)
    return outputs


class RunningAnswers:
    """Watches every step of vLLM until all requests of a call have ended. All ranks of an engine see the same steps."""

    def __init__(
        self,
        llm: LLM,
        num_requests: int,
        on_answer: OnAnswer | None,
        eos_id: int | None,
        is_unwanted: Callable[[], bool] | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Watches the `num_requests` requests that `llm` is about to be given.

        on_answer    called for an answer as soon as it has ended
        eos_id       ends every answer that is not cut, whatever was sampled there; None: answers end by themselves
        is_unwanted  checked after every step: whether to cut all running answers now, on all ranks or none
        routing      source of an answer's routing; None: answers have none
        """
        self._llm, self._on_answer, self._eos_id = llm, on_answer, eos_id
        self._is_unwanted, self._routing = is_unwanted, routing
        self._routings: dict[str, np.ndarray] = {}
        self._first = llm.request_counter.counter
        self._num_running = num_requests
        self._was_cut: frozenset[str] = frozenset()

    def after_step(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Answers that a step has finished, and those that are cut after it."""
        self._note_routings(outputs)
        self._num_running -= len(outputs)
        if self._num_running > 0 and self._is_unwanted is not None and self._is_unwanted():
            outputs = [*outputs, *self._cut()]
        if self._on_answer is not None:
            for output in outputs:
                self._on_answer(int(output.request_id) - self._first, self.completion(output))
        return outputs

    def _cut(self) -> list[RequestOutput]:
        outputs = cut_requests(self._llm, self._note_routings)
        self._num_running, self._was_cut = 0, frozenset(output.request_id for output in outputs)
        return outputs

    def _note_routings(self, outputs: list[RequestOutput]) -> None:
        if self._routing is not None:
            self._routings |= {output.request_id: self._routing.of(output) for output in outputs}

    def completion(self, output: RequestOutput) -> Completion:
        """Record of an ended request."""
        was_cut = output.request_id in self._was_cut
        completion = completion_of(output, was_cut=was_cut, routing=self._routings.get(output.request_id))
        if self._eos_id is None or was_cut:
            return completion
        completion.token_ids[-1] = self._eos_id
        return replace(completion, stop=Stop.EOS)
