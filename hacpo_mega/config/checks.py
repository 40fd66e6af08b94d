"""Every cross-check of a configuration: what one table alone cannot know. Arithmetic and the nearest valid value.

A model folder is judged by its `config.json` as plain JSON. Not here: the files that a configuration names
(`input_checks.py`), and what only a running job knows (the number of ranks: `rank_map.py`).
"""

import json
from collections.abc import Iterator
from pathlib import Path

from hacpo_mega.config.agents import AgentConfig
from hacpo_mega.config.choices import SKILLS
from hacpo_mega.config.input_checks import input_problems
from hacpo_mega.config.schema import Config

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
    problems = [*_names(config), *_batches(config), *_generator(config), *input_problems(config)]
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
    for agent in config.agents:
        # Sequence parallelism cuts a micro-batch into tp equal parts, so packing fills it up to a multiple of tp.
        if training.max_tokens_per_microbatch % agent.tp:
            yield (
                f"training.max_tokens_per_microbatch ({training.max_tokens_per_microbatch}) must be a multiple of tp "
                f"of agent {agent.name} ({agent.tp}). Nearest: "
                f"{nearest_multiples(training.max_tokens_per_microbatch, agent.tp)}"
            )


def _generator(config: Config) -> Iterator[str]:
    """Whether the built-in task has the prompts that a step, an evaluation and a warm start ask for."""
    if config.data.generator is not None:
        yield from _skills(config)
    for agent in config.agents:
        warm_start = agent.init.warm_start if agent.init is not None else None
        for skill, share in warm_start.skills.items() if warm_start is not None else ():
            if (share.num_examples or 0) > SKILLS[skill].num_training:
                yield (
                    f"agents.{agent.name}.init.warm_start.skills.{skill}.num_examples ({share.num_examples}) is more "
                    f"than there are. Nearest: {SKILLS[skill].num_training}"
                )


def _skills(config: Config) -> Iterator[str]:
    skills, step = config.data.skills, config.training.prompts_per_step
    if repeated := sorted({skill for skill in skills if skills.count(skill) > 1}):
        yield f"data.skills: {', '.join(repeated)} is listed more than once. Nearest: {list(dict.fromkeys(skills))}"
        return
    if step % len(skills):
        yield (
            f"training.prompts_per_step ({step}) must be a multiple of the {len(skills)} skills of data.skills. "
            f"Nearest: {nearest_multiples(step, len(skills))}"
        )
    rarest = min(skills, key=lambda skill: SKILLS[skill].num_training)
    if step > (most := SKILLS[rarest].num_training * len(skills)):
        yield (
            f"training.prompts_per_step ({step}) takes more prompts of {rarest!r} than the "
            f"{SKILLS[rarest].num_training} there are. Nearest: {most}"
        )
    if config.evaluation.files:
        return
    asked = config.evaluation.num_prompts
    rarest = min(skills, key=lambda skill: SKILLS[skill].num_held_out)
    most = SKILLS[rarest].num_held_out * len(skills)
    if asked < len(skills):
        yield (
            f"evaluation.num_prompts ({asked}) is less than one prompt of each of the {len(skills)} skills. "
            f"Nearest: {len(skills)}"
        )
    elif asked // len(skills) * len(skills) > most:
        yield (
            f"evaluation.num_prompts ({asked}) takes more prompts of {rarest!r} than the "
            f"{SKILLS[rarest].num_held_out} that are held out. Nearest: {most}"
        )


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
