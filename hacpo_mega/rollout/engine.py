"""The rollout engine: a live vLLM inside the trainer's own process, on CUDA and on CPU with the same code.

Every rank of an agent builds one `Engine`. `tensor_parallel_size` neighbouring ranks of the agent's default process
group form one vLLM; further ranks are independent replicas. New weights are loaded into the running model, with no file
and no second process between trainer and engine. Only this file and patches.py import vllm.

Not here: prompts as text (the engine sees token ids and never decodes), and when it is awake (agent.py).

environment.py sets these variables before torch and vllm are imported:

    VLLM_ENABLE_V1_MULTIPROCESSING=0   the engine must live in this process; without it the constructor refuses
    VLLM_LOGGING_LEVEL                 ERROR on the CPU, where vLLM warns of all that is not CUDA; WARNING on CUDA
    VLLM_ALLREDUCE_USE_FLASHINFER=0    CUDA only: else the all-reduce kernel of an engine depends on PATH
    TORCHDYNAMO_DISABLE=1              CPU only: vLLM would compile a tiny function for 18 s at the first log-probs
    OMP_NUM_THREADS                    CPU only: cores per rank. In one process vLLM binds no threads to cores by itself
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, EngineArgs, SamplingParams
from vllm import config as vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing, logger
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from hacpo_mega.config.checks.pass_through import require_accepted
from hacpo_mega.models.families.families import is_tied
from hacpo_mega.models.files.folder import eos_token_ids
from hacpo_mega.models.files.weight_files import published_names
from hacpo_mega.records import Completion
from hacpo_mega.rollout.cpu.cpu_runner import adapt_to_cpu
from hacpo_mega.rollout.cpu.decode_scheduler import decode_scheduler
from hacpo_mega.rollout.patches import VLLM
from hacpo_mega.rollout.vllm.engine_defaults import cpu_attention, engine_defaults, free_options
from hacpo_mega.rollout.vllm.engine_memory import CACHE, WEIGHTS, Memory, clear_cache, take_memory
from hacpo_mega.rollout.vllm.engine_stream_guard import EngineStreamGuard, finish_steps, worker_of
from hacpo_mega.rollout.vllm.host_process import (
    free_memory_unmeasured,
    has_expandable_segments,
    joined_to_default_group,
    quiet,
    require_process,
    starting_vllm,
)
from hacpo_mega.rollout.vllm.routing import routing_of
from hacpo_mega.rollout.vllm.running_answers import OnAnswer, RunningAnswers
from hacpo_mega.rollout.weights.engine_weights import EngineWeights, Receiver, Reloading, noted, require_names
from hacpo_mega.rollout.weights.expert_weights import converts_experts
from hacpo_mega.rollout.weights.held_weights import HeldPart, held_parts
from hacpo_mega.rollout.weights.quantized_weights import Quantizing

PLAIN = UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod
BEGIN_END = initialize_layerwise_reload, finalize_layerwise_reload
QUANTIZING = Quantizing((OnlineLinearBase,), *BEGIN_END, initialize_online_processing, logger)
RELOADING = Reloading(*BEGIN_END, PLAIN, logger, QUANTIZING)
OF_ROUTERS = bind_routed_experts_capturer, get_forward_context
# The formats that training reads: "auto" would prefer Mistral's params.json and consolidated.safetensors.
PLAIN_READING = {"config_format": "hf", "use_tqdm_on_load": False}
FOR_CPU = {"scheduler_cls": decode_scheduler(vllm_scheduler)}


def require_options(options: Mapping[str, Any], owner: str = "") -> Mapping[str, Any]:
    """The same engine arguments (`agents.vllm`); ValueError, one line, for one that vLLM would refuse."""
    tables = [kind.__pydantic_fields__ for kind in vars(vllm_config).values() if hasattr(kind, "__pydantic_fields__")]
    require_accepted(options, {field.name: field.type for field in fields(EngineArgs)}, tables, owner)
    return options


class Engine:
    """A live vLLM: samples answers, takes new weights, sleeps while the actor trains.

    All ranks of an engine call every method in lockstep with equal arguments and get equal results.
    """

    def __init__(
        self,
        model: Path,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        tensor_parallel_size: int = 1,
        seed: int = 0,
        trust_remote_code: bool = False,
        eos_ids: Sequence[int] | None = None,
        random_weights: bool = False,
        agents_on_device: int = 1,
        timeout_s: float = 1800.0,
        options: Mapping[str, Any] | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Builds the engine and loads the weights of the folder `model`. Collective over the default process group.

        max_model_len    tokens of the longest prompt and answer together
        eos_ids          token ids that end an answer, first that of answers whose length is given; None: the folder's
        random_weights   skips reading the weights: for a caller that publishes before the first answer
        agents_on_device agents with an engine on this rank's device (turns.py); equal on all ranks of the engine
        timeout_s        bounds the collectives of the engine's own groups
        options          further vLLM engine arguments, unchanged (`agents.vllm` of the configuration); with
                         enable_return_routed_experts, log-probs come with a routing (vllm/routing.py)
        on_progress      callback invoked before every engine step (one decoded token per running request)

        Raises ValueError for an option that this class decides itself, and if the process cannot host an engine.
        """
        self._on_cuda, self._shares_device = torch.cuda.is_available(), agents_on_device > 1
        options, returns_routing = free_options(require_options(options or {}), on_cuda=self._on_cuda)
        require_process(tensor_parallel_size)
        defaults = engine_defaults(
            on_cuda=self._on_cuda,
            tensor_parallel_size=tensor_parallel_size,
            visible_devices=torch.cuda.device_count(),
            agents_on_device=agents_on_device,
            timeout_s=timeout_s,
            expandable_segments=has_expandable_segments(),
        )
        if not self._on_cuda:
            defaults |= FOR_CPU | cpu_attention(model, CPUAttentionBackend, dtype.itemsize, options)
        self.eos_ids = eos_token_ids(model) if eos_ids is None else tuple(eos_ids)
        self.max_model_len, self._names = max_model_len, published_names(model, tied=is_tied(model))
        self._memory, self._is_loaded = Memory.AWAKE, not random_weights
        self._on_progress, self._running = on_progress, None
        start = partial(
            LLM,
            model=str(model),
            tensor_parallel_size=tensor_parallel_size,
            distributed_executor_backend="external_launcher",
            dtype=dtype,
            seed=seed,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=True,
            generation_config="vllm",  # a folder's own top_p or temperature must not reach the sampler
            logprobs_mode="processed_logprobs",  # after temperature, as the actor's are
            load_format="dummy" if random_weights else "safetensors",
            enable_sleep_mode=self._on_cuda,
            **{**PLAIN_READING, **defaults, **options},
        )
        with starting_vllm(VLLM), joined_to_default_group(ExecutorWithExternalLauncher):
            self._guard = EngineStreamGuard(start)
        with self._guard.open() as llm:
            self._step, llm.llm_engine.step = llm.llm_engine.step, self._watched_step
            config, converts = llm.llm_engine.vllm_config, converts_experts(worker_of(llm).get_model())
            if not self._on_cuda:
                adapt_to_cpu(worker_of(llm).model_runner, apply_top_k_top_p)
            self.routing = routing_of(llm, model, *OF_ROUTERS) if returns_routing else None
        # True if the engine holds weights in another form than they are published in.
        self.quantizes = config.quant_config is not None or converts
        self._has_tied_embeddings = bool(getattr(config.model_config.hf_config, "tie_word_embeddings", False))

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
        is_unwanted: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """One answer to every prompt (token ids), in order; `temperature` 0 is greedy.

        An answer is a function of weights, prompt and seed: other requests in the batch change it by rounding alone.
        With `lengths` every answer has that many tokens, and the last one ends it, whatever was sampled there.
        `on_answer` is called for each answer as it ends. Once `is_unwanted` returns true, running answers are cut with
        Stop.CUT.
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
        ends = FinishReason.ABORT, None if lengths is None else self.eos_ids[0]
        sampling = [
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=length or max_tokens,
                min_tokens=length or 0,
                stop_token_ids=list(self.eos_ids),
                logprobs=0 if return_logprobs else None,
                flat_logprobs=True,
                detokenize=False,
                skip_clone=True,
            )
            for seed, length in zip(seeds, lengths or [None] * len(seeds), strict=True)
        ]
        with self._guard.open() as llm:
            routing = self.routing if return_logprobs else None
            running = RunningAnswers(llm, len(prompts), on_answer, *ends, is_unwanted, routing)
            self._running = running
            try:
                outputs = _answers(llm, prompts, sampling)
            finally:
                self._running = None
        return [running.completion(output) for output in outputs]

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
            outputs = _answers(llm, sequences, [scoring] * len(sequences))
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
        self._is_loaded = False  # until all of it is
        with self._guard.open() as llm:
            worker_of(llm).reload_weights(weights_iterator=noted(weights, given, packs_head=self._packs_head()))
            llm.reset_prefix_cache()
        require_names(given, self._names)
        self._is_loaded = True

    def weights(self, published: Mapping[str, tuple[int, ...]]) -> EngineWeights:
        """Destination of every part of the published tensors (name -> shape), recorded from vLLM's own loaders."""
        self._require(Memory.AWAKE, "weights", needs_weights=False)
        with self._guard.open() as llm:
            config = llm.llm_engine.vllm_config.model_config
            return EngineWeights.recorded(worker_of(llm).get_model(), published, config, RELOADING)

    @contextmanager
    def receiving(self, weights: EngineWeights) -> Iterator[Receiver]:
        """Context of a weight sync, in which every part is written once. Drops the old weights' cached prefixes.

        RuntimeError if a part was not written, or while asleep.
        """
        self._require(Memory.WEIGHTS, "receiving", needs_weights=False)
        self._is_loaded = False  # until all of it is
        with self._guard.open() as llm, torch.inference_mode():
            receiver = Receiver(weights, partial(self._reload, llm))
            yield receiver
            llm.reset_prefix_cache()
        if receiver.missing:
            raise RuntimeError(f"{len(receiver.missing)} parameters were not published, first {receiver.missing[:4]}")
        self._is_loaded = True

    def _reload(self, llm: LLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with quiet(RELOADING.logger):  # it would warn of all layers that are not among them
            worker_of(llm).reload_weights(weights_iterator=noted(weights, set(), packs_head=self._packs_head()))

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
            yield list(held_parts(model, fused, self._has_tied_embeddings))

    def sleep(self) -> None:
        """Frees the device memory (weights and cache are dropped, not saved) and drops cached prefixes.

        On CPU vLLM cannot free memory: only the state changes. Raises RuntimeError if asleep already.
        """
        self._require(Memory.WEIGHTS, "sleep", needs_weights=False)
        with self._guard.open() as llm:
            llm.reset_prefix_cache()
            if self._on_cuda:
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
            self._memory = Memory.AWAKE if cache else Memory.WEIGHTS
            if self._on_cuda and cache:
                clear_cache(llm)

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
        if needs_weights and not self._is_loaded:
            raise RuntimeError(
                f"{verb}() needs weights, which are not there after sleep or a random start: call load()"
            )

    def _watched_step(self) -> list[Any]:
        self._on_progress()
        outputs = self._step()
        return outputs if self._running is None else self._running.after_step(outputs)


def _answers(llm: LLM, prompts: Sequence[Sequence[int]], sampling: list[SamplingParams]) -> list[Any]:
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(requests, sampling, use_tqdm=False) if requests else []
    finish_steps(llm)
    return outputs
