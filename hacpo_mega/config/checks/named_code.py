"""Code that a stored configuration would execute: graders, Python in model folders, plug-ins of the engine.

`eval` and `export` read a configuration that lies beside the model and may be another person's. Ordinary keys are taken
from it; keys that lead to code are not, unless the user gives --trust. The list holds the keys that do not lead to
code, so that a key of a later vLLM is not accepted by mistake. Not here: the configuration that a user gives to
`train`, which is the user's own.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hacpo_grading.registry import GRADERS
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.schema import RewardConfig

# Engine arguments that are numbers and switches of memory, batches and schedules, by any value of these types.
ENGINE_NUMBERS = frozenset(
    (
        "async_scheduling",
        "block_size",
        "cpu_offload_gb",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "disable_sliding_window",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "long_prefill_token_threshold",
        "max_logprobs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
    )
)
ENGINE_WORDS = frozenset(("kv_cache_dtype", "quantization"))  # which vLLM looks up among its own


def code_of_reward(reward: RewardConfig, kind: str | None) -> Iterator[str]:
    """The keys by which judging would run code; `kind` is the grader that the user names, None where he names none.

    A program that an answer is runs in the sandbox; without it, it is code, too. A judge behind a server is no code,
    but it sends answers, and the key that a variable of this machine holds, to where the configuration says. Options of
    another kind are not read.
    """
    for key, grader in reward.graders.items():
        if kind not in (None, grader.kind):
            continue
        found = GRADERS.get(grader.kind)
        if kind is None if found is None else found.asks_server:
            yield _shown(f"{key}.kind", grader.kind)
        if grader.options.get("isolated", True) is not True:
            yield _shown(f"{key}.options.isolated", grader.options["isolated"])


def code_of_model(agent: AgentConfig) -> Iterator[str]:
    """The keys by which reading an agent's folder would run code."""
    if agent.trust_remote_code:
        yield _shown(f"agents.{agent.name}.trust_remote_code", True)


def code_of_engine(agent: AgentConfig) -> Iterator[str]:
    """The keys by which its engine might."""
    for key, value in agent.vllm.items():
        is_number = key in ENGINE_NUMBERS and isinstance(value, bool | int | float)
        if not is_number and not (key in ENGINE_WORDS and isinstance(value, str) and value.isidentifier()):
            yield _shown(f"agents.{agent.name}.vllm.{key}", value)


def require_trust(named: Iterable[str], file: Path, *, trusted: bool, instead: str = "") -> None:
    """ValueError, one line, for keys of `file` that lead to code, unless its maker is trusted."""
    if not trusted and (keys := ", ".join(named)):
        raise ValueError(
            f"{file}: {keys}: their code is not run, since the file lies beside a model and is not your own "
            f"configuration. {instead}--trust takes it as it is, if you trust the maker of this run"
        )


def _shown(key: str, value: Any) -> str:
    text = "a table" if isinstance(value, Mapping) else str(value).lower() if isinstance(value, bool) else ascii(value)
    return f"{ascii(key)[1:-1]} = {text[:80]}"
