"""Settings of an engine, and the vLLM arguments that they become: on the CPU, on CUDA, on a device that agents share.

Elsewhere: defaults that the memory budget needs too (config/checks/device_memory.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from hacpo_mega.config.checks.device_memory import CPU_DEFAULTS, CUDA_DEFAULTS
from hacpo_mega.config.checks.pass_through import RETURNS_ROUTING
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.families.family import Family
from hacpo_mega.models.files.folder import has_tower, head_size, text_fields
from hacpo_mega.models.sharding.layout import delta_problem, head_size_problem

CPU_BLOCK_SIZE = 16  # tokens of a block of the KV cache


@dataclass(frozen=True)
class EngineSpec:
    """Settings with which the engine of a model folder starts, equal on all its ranks.

    max_model_len    tokens of the longest prompt and answer together
    eos_ids          token ids that end an answer, first that of answers whose length is given; None: the folder's
    random_weights   skips reading the weights: for a caller that publishes before the first answer
    can_sleep        whether its memory can be freed; without it all-reduces in CUDA graphs need no copy, since vLLM
                     allocates as usual
    agents_on_device agents with an engine on this rank's device (turns.py)
    timeout_s        bounds the collectives of the engine's own groups
    options          further vLLM engine arguments, unchanged (`agents.vllm` of the configuration); with
                     enable_return_routed_experts, log-probs come with a routing (routing.py)
    """

    model: Path
    _: KW_ONLY
    max_model_len: int
    dtype: torch.dtype
    tensor_parallel_size: int = 1
    seed: int = 0
    trust_remote_code: bool = False
    eos_ids: Sequence[int] | None = None
    random_weights: bool = False
    can_sleep: bool = True
    agents_on_device: int = 1
    timeout_s: float = 1800.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def returns_routing(self) -> bool:
        """True if log-probs come with a routing."""
        return self.options.get(RETURNS_ROUTING, False)

    @property
    def loads_itself(self) -> bool:
        """True if `Engine` loads the folder's weights in vLLM's place.

        vLLM would look for an image checkpoint's text model under other names, and would run packed weights packed.
        """
        return has_tower(self.model) or self._is_packed

    @property
    def _family(self) -> Family | None:
        if not (self.model / "config.json").is_file():
            return None
        return FAMILIES.get(str(text_fields(self.model).get("model_type")))

    @property
    def _is_packed(self) -> bool:
        if self._family is None:
            return False
        packing = text_fields(self.model).get("quantization_config") or {}
        return self._family.packs is not None and packing.get("quant_method") == self._family.packs

    @property
    def delta_net_model(self) -> str | None:
        """vLLM's class of a text model with gated delta nets; None for others."""
        family = self._family
        return None if family is None or family.delta_net is None else family.architecture

    def _text_model(self) -> dict[str, Any]:
        """Argument that makes vLLM read config.json as training does, where it would not."""
        family = self._family
        needs_fields = family is not None and (family.scales_queries or family.vllm_fields)
        if not self.loads_itself and not needs_fields:
            return {}  # also for folders that training cannot read, such as quantized exports for vLLM
        fields = Architecture.from_folder(self.model).vllm_overrides

        def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
            """The text model's configuration; vLLM also asks with an empty one, for its model_type."""
            text = config.get_text_config()
            for name, value in fields.items():
                current = getattr(text, name, None)
                setattr(text, name, {**current, **value} if isinstance(current, dict) else value)
            if hasattr(text, "quantization_config"):
                del text.quantization_config
            return text

        return {"hf_overrides": text_config}

    def vllm_arguments(
        self, *, on_cuda: bool, visible_devices: int = 0, expandable_segments: bool = False
    ) -> dict[str, Any]:
        """Arguments of vLLM's LLM: defaults, which the user's options override, and what this project decides.

        visible_devices       devices that this process sees
        expandable_segments   whether the user has set this in torch's allocator
        """
        lacks_peer_access = visible_devices == 1 or expandable_segments
        defaults = self._cuda_defaults(lacks_peer_access) if on_cuda else CPU_DEFAULTS | self._cpu_attention()
        if not on_cuda and self.delta_net_model is not None:
            # A delta net has a state in place of keys, which vLLM would share where prompts are read in parts.
            defaults["enable_prefix_caching"] = False
        # vLLM's own are 600 s with NCCL and 1800 s with gloo, however long a rank has to wait for the others.
        timeouts = ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")
        # vLLM returns routing on CUDA only: on the CPU routing.py records it.
        options = {key: value for key, value in self.options.items() if on_cuda or key != RETURNS_ROUTING}
        return {
            "use_tqdm_on_load": False,
            **dict.fromkeys(timeouts, math.ceil(self.timeout_s)),
            **defaults,
            **options,
            "model": str(self.model),
            **self._text_model(),
            "tensor_parallel_size": self.tensor_parallel_size,
            "distributed_executor_backend": "external_launcher",
            "dtype": self.dtype,
            "seed": self.seed,
            "max_model_len": self.max_model_len,
            "trust_remote_code": self.trust_remote_code,
            "skip_tokenizer_init": True,
            "config_format": "hf",  # "auto" would prefer Mistral's params.json, which training does not read
            "generation_config": "vllm",  # a folder's own top_p or temperature must not reach the sampler
            "logprobs_mode": "processed_logprobs",  # after temperature, as the actor's are
            # "auto" would prefer consolidated.safetensors.
            "load_format": "dummy" if self.random_weights or self.loads_itself else "safetensors",
            "enable_sleep_mode": on_cuda and self.can_sleep,
        }

    def _cuda_defaults(self, lacks_peer_access: bool) -> dict[str, Any]:
        defaults = {
            # Agents on a device share the half of it that engines may have: vLLM's share counts only its own memory.
            "gpu_memory_utilization": CUDA_DEFAULTS["gpu_memory_utilization"] / self.agents_on_device,
            # vLLM's 1024 of large devices is more than it captures graphs for, and takes 4 bytes x vocabulary for each.
            "max_num_seqs": CUDA_DEFAULTS["max_num_seqs"],
            # On Hopper and later vLLM would compile this fusion at the start if nvcc and ninja are on PATH: the numbers
            # of an engine would depend on the shell that started it.
            "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
            # Otherwise graphs would stay on the device while the actor learns. vLLM restores them at wake-up.
            "sleep_mode_offload_cudagraph": self.can_sleep,
        }
        if self.delta_net_model is not None:
            # On Hopper and later vLLM would take FlashInfer's kernel, whether it is installed or not, which needs nvcc
            # and ninja at the first prompt: its warm-up only warns that it failed.
            defaults["gdn_prefill_backend"] = "triton"
        if self.tensor_parallel_size > 1 and lacks_peer_access:
            # vLLM's custom all-reduce asks for its peers' devices by number, which fails in a process that sees only
            # its own. It also shares its graphs' buffers by cudaIpcGetMemHandle, which crashes on an expandable
            # segment.
            defaults["disable_custom_all_reduce"] = True
        return defaults

    def _cpu_attention(self) -> dict[str, Any]:
        """Blocks of 16 tokens for vLLM's CPU attention with 4-byte numbers.

        Answers share only whole blocks of their prompt, and the kernel that writes keys spreads a token's numbers over
        the block: with vLLM's 128, eight answers read 20 tokens each, and a write touches as many pages as a head has
        numbers. The kernels take 16 (`vec16`), though the backend names multiples of 32 only; those of other number
        types (AMX, fp8) do not.
        ValueError for head sizes that vLLM would refuse only at the first answer.
        """
        delta = None if self.delta_net_model is None else Architecture.from_folder(self.model).delta_net
        if self.dtype is torch.bfloat16 and (problem := delta_problem(delta)):
            raise ValueError(f"{self.model}: {problem}")
        has_latents = self._family is not None and self._family.latent
        size = Architecture.from_folder(self.model).cached_dim if has_latents else head_size(self.model)
        supported = (CPUMLABackend if has_latents else CPUAttentionBackend).get_supported_head_sizes()
        if problem := head_size_problem(size, supported, has_latents=has_latents):
            raise ValueError(f"{self.model}: {problem}")
        if has_latents:  # where a processor has AMX, vLLM would take another one, for bfloat16 alone
            return {"attention_backend": "CPU_MLA", "block_size": CPU_BLOCK_SIZE}
        if self.dtype.itemsize != 4 or "kv_cache_dtype" in self.options:
            return {}
        multiple_of = type(CPUAttentionBackend.get_supported_kernel_block_sizes()[0])
        CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
            lambda kv_cache_spec=None: [multiple_of(CPU_BLOCK_SIZE)]
        )
        return {"block_size": CPU_BLOCK_SIZE}
