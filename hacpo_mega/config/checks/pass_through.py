"""The two tables that go on as they are, `agents.megatron` and `agents.vllm`: their keys, and the values read here.

The fields of Megatron that work are known by name and type (megatron_fields.py). The names of vLLM's are read from the
source of the installed package, which is not imported: that takes seconds and a machine that can run it. vLLM's own
types and bounds hold its values when a rank starts, before weights are loaded (rollout/engine.py).
"""

import ast
import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from hacpo_grading.graders.options import COUNT, DISTANCE, FLAG, TEXT, Option
from hacpo_mega.config.checks.device_memory import capacity, is_cpu_build
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.memory.quantized import KINDS
from hacpo_mega.models.files.documents import did_you_mean, short
from hacpo_mega.models.sharding.layout import FIRST_STAGE, LAST_STAGE, VIRTUAL
from hacpo_mega.models.sharding.megatron_fields import (
    AUX_LOSS,
    BALANCING,
    DECIDED,
    DECIDED_BY_RECOMPUTE,
    FREE,
    Z_LOSS,
    no_effect,
)

# Set by agents.router_replay.
RETURNS_ROUTING = "enable_return_routed_experts"
# vLLM's engine arguments that this project decides itself.
DECIDED_VLLM = frozenset(
    (
        "model",
        "tokenizer",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "distributed_executor_backend",
        "dtype",
        "seed",
        "trust_remote_code",
        "max_model_len",
        "generation_config",
        "skip_tokenizer_init",
        "enable_sleep_mode",
        "load_format",
        "logprobs_mode",
        # Any of these makes the engine another model than the one that is trained.
        "hf_overrides",
        "hf_config_path",
        "config_format",
        "model_weights",
        "revision",
        "code_revision",
        "tokenizer_revision",
        "runner",
        "convert",
        "worker_cls",
        "disable_log_stats",
        # Every engine rank has a part of every expert: what publishing and verification count on.
        "enable_expert_parallel",
        "enable_eplb",
        RETURNS_ROUTING,
    )
)

_SIZE = Option("a whole number from 0", lambda value: type(value) is int and 0 <= value < 2**63)
_PART = Option("a number above 0, at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
# Engine arguments that the memory formula and the checks read, too: the values they can read.
READ_HERE: dict[str, Option] = {
    **{"gpu_memory_utilization": _PART, "max_num_seqs": COUNT, "kv_cache_memory_bytes": _SIZE},
    **{"enforce_eager": FLAG, "enable_prefix_caching": FLAG, "quantization": TEXT, "kv_cache_dtype": TEXT},
}
# Values of Megatron's free fields; those that are missing here are flags.
MEGATRON_VALUES: dict[str, Option] = {
    **{AUX_LOSS: DISTANCE, Z_LOSS: DISTANCE, BALANCING: TEXT},
    **dict.fromkeys((FIRST_STAGE, LAST_STAGE, VIRTUAL), _SIZE),
}
# Quantization of vLLM 0.32 that needs a folder that is quantized already.
OFFLINE_QUANTIZATION = frozenset(
    (
        *("auto_awq", "awq", "awq_marlin", "auto_gptq", "gptq", "gptq_marlin", "moe_wna16", "inc"),
        *("compressed-tensors", "fbgemm_fp8", "quark", "torchao"),
        *("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"),
    )
)


def table_problems(megatron: Mapping[str, Any], vllm: Mapping[str, Any]) -> Iterator[str]:
    """A line for every key that this project decides, that the library does not know, or that has an invalid value."""
    for table, given, decided in (("megatron", megatron, DECIDED), ("vllm", vllm, DECIDED_VLLM)):
        for key in sorted(decided & given.keys()):
            by = "recompute" if key in DECIDED_BY_RECOMPUTE else "tp, cp, pp, engine_tp"
            yield f"{table}.{key} is decided by this project, from the model folder and the agent's {by}; remove it"
    for key in [key for key in megatron if key not in DECIDED]:
        if key not in FREE:
            yield (
                f"megatron.{key}: no field of Megatron's that has an effect here: what it would set follows from the "
                f"model folder and the agent's own keys, or is not built; remove it{did_you_mean(key, FREE, 0.8)}"
            )
        elif problem := no_effect(key, megatron[key]):
            yield f"megatron.{key}: {problem}"
        elif not (kind := MEGATRON_VALUES.get(key, FLAG)).takes(megatron[key]):
            yield f"megatron.{key} must be {kind.words}, found {short(megatron[key])}"
    free = [key for key in vllm if key not in DECIDED_VLLM]
    names = engine_fields() if free else None
    for key in free:
        if names is not None and key not in names:
            yield f"vllm.{key}: vLLM's EngineArgs has no such field{did_you_mean(key, names - DECIDED_VLLM)}"
        elif key in READ_HERE and not READ_HERE[key].takes(vllm[key]):
            yield f"vllm.{key} must be {READ_HERE[key].words}, found {short(vllm[key])}"


def require_accepted(
    options: Mapping[str, Any], types: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], owner: str
) -> None:
    """Checks engine arguments by vLLM's `types`, by name, and the bounds of the fields in its pydantic `tables`.

    ValueError, one line that begins with `owner`, for an argument that is decided here or unknown to vLLM, and for a
    value that it would refuse or make another type of.
    """
    for key, value in options.items():
        if key in DECIDED_VLLM - {RETURNS_ROUTING}:
            raise ValueError(f"{owner}vllm.{key} = {short(value)}: this key is decided by the project; remove it")
        if key not in types:
            raise ValueError(f"{owner}vllm.{key}: vLLM's EngineArgs has no such field{did_you_mean(key, types)}")
        if isinstance(types[key], str):  # it names what vLLM imports for a type checker alone
            continue
        bounds = [bound for table in tables if key in table for bound in table[key].metadata]
        try:
            parsed = TypeAdapter(Annotated[types[key], *bounds] if bounds else types[key]).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].splitlines()[0]
            raise ValueError(f"{owner}vllm.{key}: {reason[0].lower()}{reason[1:]}, found {short(value)}") from error
        both = type(value), type(parsed)
        if len({bool, int, float, str} & set(both)) > 1 and both != (int, float):
            raise ValueError(f"{owner}vllm.{key} must be {both[1].__name__}, found {short(value)}")


def engine_fields() -> frozenset[str] | None:
    """The names of vLLM's engine arguments; None where vLLM is not installed (a login node)."""
    tree = _vllm_source("engine/arg_utils.py")
    if tree is None:
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    return frozenset(entry.target.id for node in classes for entry in node.body if isinstance(entry, ast.AnnAssign))


def engine_head_sizes(*, has_latents: bool) -> Collection[int] | None:
    """The head sizes, or sizes of latents, that vLLM's attention on CPU knows, where its CPU build is installed; else
    None."""
    if not is_cpu_build():
        return None
    tree = _vllm_source(f"v1/attention/backends/{'mla/cpu_mla' if has_latents else 'cpu_attn'}.py")
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            return ast.literal_eval(node.body[-1].value)
    return None


def _vllm_source(file: str) -> ast.Module | None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))


def quantization_problems(config: Config, agent: AgentConfig) -> Iterator[str]:
    """A line for a `vllm.quantization` that the engine would refuse."""
    kind = agent.vllm.get("quantization")
    if kind is None:
        return
    if kind in OFFLINE_QUANTIZATION:
        yield (
            f"vllm.quantization: {kind!r} is for folders that are quantized already, and engines here get the "
            f"weights that are trained. Nearest: 'fp8_per_tensor'; known here: {', '.join(KINDS)}"
        )
    elif capacity(config) is None or agent.dtype == "float32":
        yield f"vllm.quantization: {kind!r} is for bf16 weights on a GPU. Nearest: without it"
