"""Engines with quantized weights: the combinations that cannot run, and the suggestions of `hacpo-mega check`."""

from collections.abc import Iterator

from hacpo_mega.config.checks.device_memory import capacity
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.memory.quantized import KINDS

# Kinds of vLLM 0.32 that read how a folder was quantized from it, and refuse one that was not.
OF_QUANTIZED_FOLDERS = frozenset(
    (
        *("auto_awq", "awq", "awq_marlin", "auto_gptq", "gptq", "gptq_marlin", "moe_wna16", "inc"),
        *("compressed-tensors", "fbgemm_fp8", "quark", "torchao"),
        *("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"),
    )
)


def quantization_problems(config: Config, agent: AgentConfig) -> Iterator[str]:
    """A line for a `vllm.quantization` that the engine would refuse."""
    kind = agent.vllm.get("quantization")
    if kind is None:
        return
    if kind in OF_QUANTIZED_FOLDERS:
        yield (
            f"vllm.quantization: {kind!r} is for folders that are quantized already, and engines here get the "
            f"weights that are trained. Nearest: 'fp8_per_tensor'; known here: {', '.join(KINDS)}"
        )
    elif capacity(config) is None:
        yield (
            f"vllm.quantization: {kind!r} is for bf16 weights, and engines on the CPU hold float32. Nearest: without it"
        )


def suggestions(config: Config) -> Iterator[str]:
    """A line for each agent that samples from another policy than the trained one.

    Where answers are of one step before, the ratio is to the engine's own log-probs already.
    """
    if config.rollout.engine_correction != "none" or config.mode.one_step_off:
        return
    for agent in config.agents:
        kind, cache = agent.vllm.get("quantization"), agent.vllm.get("kv_cache_dtype")
        named = {"quantization": kind, "kv_cache_dtype": cache if str(cache).startswith("fp8") else None}
        for key, value in named.items():
            if value is not None:
                yield (
                    f"agents.{agent.name}.vllm.{key} = {value!r}: its answers are drawn from a coarser policy than the "
                    "one that is trained; rollout.engine_correction = 'token' weighs every token by how much"
                )
