"""Every cross-check of a configuration: what one table alone cannot know. Arithmetic and the nearest valid value.

A model folder is judged by its `config.json` as plain JSON. Not here: whether a data file's rows are good
(`data/prompts.py`), and what only a running job knows (the number of ranks: `rank_map.py`).
"""

import json
from collections.abc import Iterator
from pathlib import Path

from hacpo_mega.config.schema import AgentConfig, Config

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Keys of the pass-through tables that this project decides itself; a second opinion there would split the truth.
OWNED_BY_US_MEGATRON = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    "params_dtype",
    "bf16",
    "variable_seq_lengths",
}
OWNED_BY_US_VLLM = {
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
    "worker_cls",
    "disable_log_stats",
}


def find_problems(config: Config) -> list[str]:
    """Every cross-check that fails: a line each with the numbers and the nearest valid value."""
    problems = [*_names(config), *_batches(config), *_files(config)]
    longest = config.rollout.max_prompt_tokens + config.rollout.max_answer_tokens
    for agent in config.agents:
        problems += [f"agents.{agent.name}: {problem}" for problem in _agent(agent, longest)]
    return problems


def nearest_multiples(value: int, of: int) -> str:
    """The multiples of `of` on both sides of `value`, as a person would say them: '96 or 104'."""
    below, above = value // of * of, -(-value // of) * of
    return f"{above}" if below < 1 else f"{below} or {above}"


def _names(config: Config) -> Iterator[str]:
    names = [agent.name for agent in config.agents]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"agents: the name {name!r} occurs {names.count(name)} times; every agent needs its own"


def _batches(config: Config) -> Iterator[str]:
    training, lanes = config.training, config.lanes
    step, update = training.prompts_per_step, training.prompts_per_update
    if step % update:
        yield (
            f"training.prompts_per_step ({step}) must be a multiple of training.prompts_per_update ({update}). "
            f"Nearest: {nearest_multiples(step, update)}"
        )
    for agent in config.agents:
        cells = lanes * agent.cells_per_lane
        if update % cells:
            yield (
                f"training.prompts_per_update ({update}) must be a multiple of lanes x cells_per_lane of agent "
                f"{agent.name} ({lanes} x {agent.cells_per_lane} = {cells}). "
                f"Nearest: {nearest_multiples(update, cells)}"
            )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_answer_tokens
    if longest > training.max_tokens_per_microbatch:
        yield (
            f"training.max_tokens_per_microbatch ({training.max_tokens_per_microbatch}) must hold one prompt and "
            f"answer (rollout.max_prompt_tokens + max_answer_tokens = {longest}). Nearest: {longest}"
        )


def _files(config: Config) -> Iterator[str]:
    for section, files in (("data", config.data.files), ("evaluation", config.evaluation.files)):
        for file in files:
            if not file.is_file():
                yield f"{section}.files: {file} does not exist"
    if config.reward.kind == "arithmetic" and config.data.generator != "arithmetic":
        yield "reward.kind = 'arithmetic' judges only data.generator = 'arithmetic'; use reward.kind = 'math' for files"


def _agent(agent: AgentConfig, longest: int) -> Iterator[str]:
    for table, keys, owned in (
        ("megatron", agent.megatron, OWNED_BY_US_MEGATRON),
        ("vllm", agent.vllm, OWNED_BY_US_VLLM),
    ):
        for key in sorted(owned & keys.keys()):
            yield f"{table}.{key} is decided by this project; set tp, pp, engine_tp or seed of the run instead"
    if agent.cell_size % agent.engine_tensor_parallel:
        yield (
            f"engine_tp ({agent.engine_tp}) must divide tp x pp ({agent.tp} x {agent.pp} = {agent.cell_size}). "
            f"Nearest: {_nearest_divisor(agent.engine_tensor_parallel, agent.cell_size)}"
        )
    yield from _model(agent, longest)


def _nearest_divisor(value: int, of: int) -> int:
    return min((divisor for divisor in range(1, of + 1) if of % divisor == 0), key=lambda d: abs(d - value))


def _model(agent: AgentConfig, longest: int) -> Iterator[str]:
    """Checks of the layout against the model's sizes, from its folder or, before `init`, from the init table."""
    try:
        sizes = _sizes(agent)
    except ValueError as problem:
        yield str(problem)
        return
    heads, kv_heads, layers, ffn, positions = sizes
    for what, size, by, parts in (
        ("attention heads", heads, "tp", agent.tp),
        ("key-value heads", kv_heads, "tp", agent.tp),
        ("feed-forward columns", ffn, "tp", agent.tp),
        ("layers", layers, "pp", agent.pp),
        ("attention heads", heads, "engine_tp", agent.engine_tensor_parallel),
    ):
        if size % parts:
            yield (
                f"{by} ({parts}) must divide the model's {size} {what}. Nearest: {by} = {_nearest_divisor(parts, size)}"
            )
    if longest > positions:
        yield (
            f"rollout.max_prompt_tokens + max_answer_tokens ({longest}) is beyond the {positions} positions of "
            f"{agent.model}. Nearest: {positions}"
        )


def _sizes(agent: AgentConfig) -> tuple[int, int, int, int, int]:
    """(attention heads, key-value heads, layers, feed-forward size, positions) of an agent's model."""
    file = Path(agent.model) / "config.json"
    if not file.is_file():
        if agent.init is None:
            raise ValueError(f"model folder {agent.model} has no config.json; give a Hugging Face folder")
        init = agent.init
        return init.num_heads, init.num_kv_heads, init.num_layers, init.ffn_size, init.max_positions
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        architecture = (table.get("architectures") or ["none given"])[0]
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"{file}: architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        heads = table["num_attention_heads"]
        return (
            heads,
            table.get("num_key_value_heads", heads),
            table["num_hidden_layers"],
            table["intermediate_size"],
            table["max_position_embeddings"],
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    except KeyError as error:
        raise ValueError(f"{file}: the field {error} is missing") from error
