"""Every cross-check of a configuration: what one table alone cannot know. Arithmetic and the nearest valid value.

What a model folder is and which layout a model can have is decided in models/, for the model builder too. Not here:
whether a data file's rows are good (`data/prompts.py`), and what only a running job knows (the number of ranks:
`rank_map.py`).
"""

from collections.abc import Iterator
from pathlib import Path

from hacpo_mega.config.pass_through import engine_head_sizes, table_problems
from hacpo_mega.config.schema import AgentConfig, Config
from hacpo_mega.models.architecture import Architecture
from hacpo_mega.models.folder import tokenizer_problems
from hacpo_mega.models.layout import Layout, layout_problems
from hacpo_mega.models.segments import all_sources
from hacpo_mega.models.weight_files import weight_problems


def find_problems(config: Config) -> list[str]:
    """Every cross-check that fails: a line each with the numbers and the nearest valid value."""
    problems = [*_names(config), *_batches(config), *_files(config)]
    longest = config.rollout.max_prompt_tokens + config.longest_answer
    for agent in config.agents:
        found = _agent(agent, longest, config.training.max_tokens_per_microbatch)
        problems += [f"agents.{agent.name}: {problem}" for problem in found]
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


def _agent(agent: AgentConfig, longest: int, max_tokens_per_microbatch: int) -> Iterator[str]:
    """The two pass-through tables, the model folder, and the layout: by the rules that the model builder has too."""
    table_lines = list(table_problems(agent.megatron, agent.vllm))
    yield from table_lines
    if max_tokens_per_microbatch % agent.tp:
        yield (
            f"training.max_tokens_per_microbatch ({max_tokens_per_microbatch}) must be a multiple of tp ({agent.tp}). "
            f"Nearest: {nearest_multiples(max_tokens_per_microbatch, agent.tp)}"
        )
    try:
        layout = Layout.of(agent.tp, agent.pp, agent.megatron, agent.engine_tensor_parallel)
    except ValueError as problem:
        yield from () if table_lines else [str(problem)]
        return
    try:
        architecture = architecture_of(agent)
    except ValueError as problem:
        yield str(problem)
        return
    yield from layout_problems(architecture, layout, max_positions=longest, engine_head_sizes=engine_head_sizes())
    if not _is_planned(agent):
        yield from _folder(agent.model, architecture)


def _folder(folder: Path, architecture: Architecture) -> Iterator[str]:
    wanted = {source.name: source.shape for source in all_sources(architecture)}
    yield from weight_problems(folder, wanted, family=architecture.family, tied=architecture.tied)
    yield from tokenizer_problems(folder)


def architecture_of(agent: AgentConfig) -> Architecture:
    """An agent's model: from its folder or, before `init` has made it, from the init table. ValueError in one line."""
    if not _is_planned(agent):
        return Architecture.from_folder(agent.model)
    init = agent.init
    try:
        return Architecture(
            family=init.family,
            num_layers=init.num_layers,
            hidden_size=init.hidden_size,
            num_heads=init.num_heads,
            num_kv_heads=init.num_kv_heads,
            head_dim=init.head_dim,
            ffn_size=init.ffn_size,
            vocab_size=len(init.vocabulary),
            max_positions=init.max_positions,
            norm_eps=1e-6,
            rope_theta=10_000.0,
            rope=None,
            tied=init.tied_embeddings,
            qkv_bias=init.family == "qwen2",
            output_bias=False,
            qk_norm=init.family == "qwen3",
        )
    except ValueError as problem:
        raise ValueError(f"init: {problem}") from problem


def _is_planned(agent: AgentConfig) -> bool:
    return agent.init is not None and not (agent.model / "config.json").is_file()
