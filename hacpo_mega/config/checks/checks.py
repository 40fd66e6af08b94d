"""Cross-checks of a configuration, over several tables: arithmetic and the nearest valid value.

models/ decides what a model folder is and which layout a model can have, for the model builder too. Elsewhere: the
other files that a configuration names (`input_checks.py`), and what only a running job knows (the number of ranks:
`rank_map.py`), and whether engine_tp divides engines on devices of their own (models/sharding/layout.py).
"""

import math
from collections.abc import Collection, Iterator
from pathlib import Path

from hacpo_mega.config.checks.device_memory import capacity, memory_problems
from hacpo_mega.config.checks.input_checks import input_problems, is_planned
from hacpo_mega.config.checks.notes import BF16_GAP, narrow_clip
from hacpo_mega.config.checks.pass_through import (
    engine_head_sizes,
    quantization_problems,
    table_problems,
)
from hacpo_mega.config.checks.tokenizer_checks import one_tokenizer_problem, tokenizer_problems
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.choices import SKILLS
from hacpo_mega.config.tables.methods import METHODS
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.files.folder import dtype_name
from hacpo_mega.models.files.hub import HubModel
from hacpo_mega.models.files.weight_files import head_problem, weight_problems
from hacpo_mega.models.public import PUBLIC_NAMES, public_architecture
from hacpo_mega.models.sharding.layout import Layout, delta_problem, layout_problems
from hacpo_mega.models.sharding.lora import lora_problems
from hacpo_mega.models.sharding.megatron_fields import field_problems
from hacpo_mega.models.sharding.segments import all_sources

# Parts of metric names (logbook/files/metrics.py), which readers search for: an agent's own name must be none.
METRIC_WORDS = frozenset(
    {"accuracy", "conversation", "eval", "from", "memory", "own", "phase"}
    | {"phase_mean", "reward", "self", "verdict", "view", "wait"}
)
# Limit of a lane's answers in a step: each takes a kilobyte of text and records, however short it is.
MOST_ANSWERS = 2**22


def find_problems(config: Config, *, try_templates: bool = True, to_come: Collection[str] = ()) -> list[str]:
    """Every cross-check that fails: a line each with the numbers and the nearest valid value.

    For the agents `to_come`, only the tables are checked: their models are downloaded once all else is in order.
    `try_templates` also says whether a tied head is compared with its embedding.
    """
    problems = [*batch_problems(config), *_generator(config), *_named_once(config)]
    problems += [*input_problems(config), *one_tokenizer_problem(config)]
    for agent in config.agents:
        if agent.name in to_come:
            problems += [f"agents.{agent.name}: {problem}" for problem in _tables(config, agent)[1]]
            continue
        lines = list(_agent(config, agent, try_templates))
        if lines and (model := HubModel.of_snapshot(agent.model)):
            lines.append(f"{model} may be in the cache in part; `{model.download}` completes it")
        lines = lines or [  # which need a layout that the model can have
            *quantization_problems(config, agent),
            *expert_problems(agent, architecture_of(agent), on_cpu=capacity(config) is None),
            *memory_problems(config, agent, architecture_of(agent)),
        ]
        problems += [f"agents.{agent.name}: {line}" for line in lines]
    return problems


def batch_problems(config: Config) -> list[str]:
    """Problems that no file, model or device decides: names, the method, the sizes of step, update and cell."""
    rules = (_names, _method, _scoring, apart_problems, _one_step_off, _batches, _answers, _conversations, _roles)
    return [problem for rule in rules for problem in rule(config)]


def nearest_multiples(value: int, of: int, least: int = 1) -> str:
    """The multiples of `of` on both sides of `value`, from `least` on, as text: '96 or 104'."""
    below, above = value // of * of, -(-max(value, least) // of) * of
    return f"{above}" if below in (above, 0) or below < least else f"{below} or {above}"


def update_unit(config: Config) -> int:
    """The divisor of prompts_per_update, from every agent's cells and the method."""
    cells = (config.lanes * agent.cells_per_lane for agent in config.agents)
    return math.lcm(*cells) * METHODS[config.algorithm.method].updates


def largest_step(config: Config, most: int) -> str:
    """The largest prompts_per_step up to `most` that the rest of the configuration takes, as the end of a complaint."""
    skills = len(config.data.skills) if config.data.generator is not None else 1
    unit = math.lcm(config.training.prompts_per_update, skills)
    if best := most // unit * unit:
        return f"Nearest: {best}"
    unit = math.lcm(update_unit(config), skills)
    if best := most // unit * unit:
        return f"Nearest: {best}, with training.prompts_per_update = {best}"
    return f"Give at least {unit} of them: lanes, cells and skills divide a step"


def _names(config: Config) -> Iterator[str]:
    names = [agent.name for agent in config.agents]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"agents: the name {name!r} occurs {names.count(name)} times; every agent needs its own"
    for name in names:
        if name in METRIC_WORDS or name.startswith("num_"):
            yield (
                f"agents: the name {name!r} is a word of metric names, such as agent/NAME/phase/x_s or num_answers, "
                f"and would be taken for it. Nearest: 'agent_{name}'"
            )
    for agent in config.agents:
        if agent.init is not None and str(agent.model) in PUBLIC_NAMES:
            yield (
                f"agents.{agent.name}.model: {agent.model} is a model of the Hub, and agents.{agent.name}.init would "
                "make another under that name. Nearest: a file without the init table"
            )
    for name in sorted(config.slurm.agents.keys() - set(names)):
        yield f"slurm.agents.{name}: there is no agent of that name; there are: {', '.join(names)}"


def _method(config: Config) -> Iterator[str]:
    """Checks that the method fits this number of agents and answers."""
    name = config.algorithm.method
    if config.answers_compared == 1 and name != "sgt" and config.algorithm.advantages is None:
        yield (
            f"rollout.rollouts_per_prompt ({config.rollout.rollouts_per_prompt}): {name!r} measures an answer against "
            f"the others to its prompt, and here there is none: every advantage is 0. Nearest: 2"
        )
    if METHODS[name].needs_peers and len(config.agents) == 1:
        yield f"algorithm.method: {name!r} learns from other agents, and there is one. Nearest: 'gspo', for one alone"


def _scoring(config: Config) -> Iterator[str]:
    """Checks that scoring may wait for the first update, and that the own clip allows for the engine's log-probs."""
    if config.training.score_in_first_update is True:
        yield from (f"training.score_in_first_update: {reason}. Nearest: false" for reason in config.why_scored_before)
    if config.rollout.engine_correction == "ratio" and (subject := narrow_clip(config)) is not None:
        yield (
            f"rollout.engine_correction: 'ratio' needs a wider own clip. {subject}, to and from the engine. "
            f"Nearest: algorithm.eps_low = {BF16_GAP} and algorithm.eps_high = {BF16_GAP}, or 'none'"
        )


def _one_step_off(config: Config) -> Iterator[str]:
    """Checks that an engine can answer while its actor learns."""
    if not config.mode.one_step_off:
        return
    if config.mode.takes_turns:
        yield (
            "rollout.one_step_off: with placement = 'shared' nothing of an agent is on the device while another has "
            "its turn. Nearest: placement = 'split', or one_step_off = false"
        )
    if config.rollout.engine_correction != "none":
        yield (
            f"rollout.engine_correction: {config.rollout.engine_correction!r} corrects the ratio to the trainer's "
            "log-probs; with rollout.one_step_off it is to those of the engine already. Nearest: 'none'"
        )
    if config.reward.while_sampling:
        yield (
            "reward.while_sampling: with rollout.one_step_off the answers that are sampled are not those of the step "
            "that is judged. Nearest: false"
        )
    for agent in config.agents:
        if (engine_tp := agent.engine_tensor_parallel) > 1 and not config.mode.is_apart:
            yield (
                f"rollout.one_step_off: an engine of agent {agent.name} is over {engine_tp} ranks, whose collectives "
                "and those of learning could meet in two orders. Nearest: engine_tp = 1"
            )
        if agent.offload == "optimizer" and not config.mode.is_apart:
            yield (
                f"agents.{agent.name}.offload: with rollout.one_step_off the engine is awake while the agent learns, "
                "so nothing is ever offloaded. Nearest: 'none'"
            )


def _batches(config: Config) -> Iterator[str]:
    training, lanes = config.training, config.lanes
    step, update = training.prompts_per_step, training.prompts_per_update
    skills = len(set(config.data.skills)) if config.data.generator is not None else 1
    per_update = METHODS[config.algorithm.method].updates
    if step % update:
        yield (
            f"training.prompts_per_step ({step}) must be a multiple of training.prompts_per_update ({update}). "
            f"Nearest: {nearest_multiples(step, math.lcm(update, skills))}"
        )
    for agent in config.agents:
        cells = lanes * agent.cells_per_lane
        if update % (cells * per_update):
            of_method = f" x {per_update} of method {config.algorithm.method!r}" if per_update > 1 else ""
            yield (
                f"training.prompts_per_update ({update}) must be a multiple of lanes x cells_per_lane of agent "
                f"{agent.name}{of_method} ({lanes} x {agent.cells_per_lane}{f' x {per_update}' if of_method else ''} = "
                f"{cells * per_update}). Nearest: {nearest_multiples(update, update_unit(config))}"
            )
    longest = config.rollout.max_prompt_tokens + config.longest_rollout
    shares = math.lcm(*(agent.tp * agent.cp for agent in config.agents))
    if longest > training.max_tokens_per_microbatch:
        yield (
            f"training.max_tokens_per_microbatch ({training.max_tokens_per_microbatch}) must hold one prompt and "
            f"{_longest_words(config)} = {longest}). Nearest: "
            f"{nearest_multiples(longest, shares, longest)}"
        )
    for agent in config.agents:
        # Ranks of cp, and under sequence parallelism of tp, share a micro-batch equally: packing fills it up.
        if training.max_tokens_per_microbatch % (parts := agent.tp * agent.cp):
            words, sizes = ("tp x cp", f"{agent.tp} x {agent.cp} = {parts}") if agent.cp > 1 else ("tp", f"{parts}")
            yield (
                f"training.max_tokens_per_microbatch ({training.max_tokens_per_microbatch}) must be a multiple of "
                f"{words} of agent {agent.name} ({sizes}). Nearest: "
                f"{nearest_multiples(training.max_tokens_per_microbatch, shares, longest)}"
            )


def _answers(config: Config) -> Iterator[str]:
    """Checks that every process of a lane can hold the answers of a step."""
    prompts, group = -(-config.training.prompts_per_step // config.lanes), config.answers_per_prompt
    if (answers := prompts * group * len(config.agents)) > MOST_ANSWERS:
        rollouts = config.rollout.rollouts_per_prompt
        fewer = rollouts * MOST_ANSWERS // answers
        fitting = MOST_ANSWERS * config.lanes * rollouts // (group * len(config.agents))
        nearest = (
            f"Nearest: {fewer}" if fewer else f"With 1 as training.prompts_per_step. {largest_step(config, fitting)}"
        )
        yield (
            f"rollout.rollouts_per_prompt ({rollouts}): {prompts} prompts of a lane x {group} answers x "
            f"{len(config.agents)} agents are {answers:,} answers that every process of a lane holds in a step; at "
            f"most {MOST_ANSWERS:,} are. {nearest}"
        )


def _generator(config: Config) -> Iterator[str]:
    """Checks that the built-in task has the prompts that a step, an evaluation and a warm start ask for."""
    if config.data.generator is not None:
        yield from _skills(config)
    for agent in config.agents:
        warm_start = agent.init.warm_start if agent.init is not None else None
        for skill, share in warm_start.skills.items() if warm_start is not None else ():
            key = f"agents.{agent.name}.init.warm_start.skills.{skill}"
            halves = share.first + share.second
            if halves > 0.0 and (skill != "chain" or config.conversation.environment is None):
                yield f"{key}: first and second are of the skill chain, in a conversation (conversation.environment)"
            if share.totals and (halves or share.with_tool or skill not in ("sum", "chain")):
                yield f"{key}.totals: whole examples of sum and chain are worked by totals. Nearest: 0"
            if halves > 1.0:
                yield f"{key}: first and second are shares of the examples, and add up to {halves:g}. Nearest: 1"
            if (share.num_examples or 0) > SKILLS[skill].num_training:
                yield (
                    f"{key}.num_examples ({share.num_examples}) is more than there are. Nearest: "
                    f"{SKILLS[skill].num_training}"
                )


def _named_once(config: Config) -> Iterator[str]:
    """Checks that a list names everything once, that a field of a row has one purpose, and that each traced step is
    reached."""
    logging = config.logging
    lists = {f"logging.{key}": getattr(logging, key) for key in ("trackers", "trace_steps")}
    lists["logging.metrics"] = [name.rpartition(":")[2] for name in logging.metrics]
    for agent in config.agents:
        if agent.lora is not None and not isinstance(agent.lora.targets, str):
            lists[f"agents.{agent.name}.lora.targets"] = agent.lora.targets
    for key, values in lists.items():
        if len(set(values)) < len(values):
            yield f"{key}: {list(values)} names one twice. Nearest: {list(dict.fromkeys(values))}"
    if (last := max(config.traced_steps, default=0)) > config.num_steps:
        nearest = [step for step in logging.trace_steps if step <= config.num_steps] or [config.num_steps]
        yield (
            f"logging.trace_steps: step {last} is after the last one (num_steps = "
            f"{config.num_steps}). Nearest: {nearest}"
        )
    read: dict[str, str] = {}
    for key in ("prompt_field", "gold_field", "tools_field"):
        name = getattr(config.data, key)
        if name is not None and (first := read.setdefault(name, key)) != key:
            yield f"data.{key}: {name!r} is data.{first}, too; give the field that holds it alone"


def _skills(config: Config) -> Iterator[str]:
    skills, step = config.data.skills, config.training.prompts_per_step
    if repeated := sorted({skill for skill in skills if skills.count(skill) > 1}):
        yield f"data.skills: {', '.join(repeated)} is listed more than once. Nearest: {list(dict.fromkeys(skills))}"
        return
    if step % len(skills):
        yield (
            f"training.prompts_per_step ({step}) must be a multiple of the {len(skills)} skills of data.skills. "
            f"Nearest: {nearest_multiples(step, math.lcm(config.training.prompts_per_update, len(skills)))}"
        )
    rarest = min(skills, key=lambda skill: SKILLS[skill].num_training)
    if step > (most := SKILLS[rarest].num_training * len(skills)):
        yield (
            f"training.prompts_per_step ({step}) takes more prompts of {rarest!r} than the "
            f"{SKILLS[rarest].num_training} there are. {largest_step(config, most)}"
        )
    if config.evaluation.files:
        return
    num_prompts = config.evaluation.num_prompts
    rarest = min(skills, key=lambda skill: SKILLS[skill].num_held_out)
    most = SKILLS[rarest].num_held_out * len(skills)
    if num_prompts < len(skills):
        yield (
            f"evaluation.num_prompts ({num_prompts}) is less than one prompt of each of the {len(skills)} skills. "
            f"Nearest: {len(skills)}"
        )
    elif num_prompts // len(skills) * len(skills) > most:
        yield (
            f"evaluation.num_prompts ({num_prompts}) takes more prompts of {rarest!r} than the "
            f"{SKILLS[rarest].num_held_out} that are held out. Nearest: {most}"
        )


def _tables(config: Config, agent: AgentConfig) -> tuple[Layout | None, list[str]]:
    """An agent's layout, if it can be one, and the problems of its tables that do not depend on its model."""
    lines = list(table_problems(agent.megatron, agent.vllm))
    try:
        return agent.layout(config.lanes), lines
    except ValueError as problem:
        return None, lines or [str(problem)]


def _agent(config: Config, agent: AgentConfig, try_template: bool) -> Iterator[str]:
    """Problems of an agent's pass-through tables, model folder and layout, by the rules of the model builder."""
    layout, problems = _tables(config, agent)
    yield from problems
    if layout is None:
        return
    try:
        architecture = architecture_of(agent)
    except ValueError as problem:
        yield str(problem)
        return
    if not is_planned(agent):
        try:
            dtype_name(agent.model)
        except ValueError as problem:
            yield str(problem)
    head_sizes = engine_head_sizes(has_latents=architecture.latent is not None)
    yield from _fit_problems(config, agent, architecture, layout, head_sizes)
    if agent.dtype == "bfloat16" and head_sizes and (problem := delta_problem(architecture.delta_net)):
        yield problem
    yield from _adapters(agent, architecture)
    if not is_planned(agent):
        yield from _folder(agent.model, architecture, reads_bytes=try_template)
        yield from tokenizer_problems(agent, architecture.vocab_size, try_template, config.data.tools_field)


def _fit_problems(
    config: Config, agent: AgentConfig, model: Architecture, layout: Layout, head_sizes: Collection[int] | None = None
) -> Iterator[str]:
    """Problems of an agent's layout, of its fields of Megatron and of the lengths of a run with its model."""
    yield from layout_problems(model, layout, engine_head_sizes=head_sizes)
    yield from field_problems(agent.megatron, model, layout, has_adapters=agent.lora is not None)
    yield from _position_problems(config, model)


def _conversations(config: Config) -> Iterator[str]:
    """Checks that a conversation holds a turn, and that nothing is asked of one that it cannot have."""
    conversation, turn = config.conversation, config.rollout.max_answer_tokens
    if conversation.environment is None:
        for key in sorted(conversation.model_dump(exclude_defaults=True)):
            yield f"conversation.{key}: nothing reads it without conversation.environment. Nearest: leave it out"
        return
    if config.longest_rollout < turn:
        yield (
            f"conversation.max_total_tokens ({conversation.max_total_tokens}) must hold a turn of "
            f"rollout.max_answer_tokens ({turn}). Nearest: {turn}"
        )
    for agent in config.agents:
        if agent.router_replay:
            yield f"agents.{agent.name}: router_replay has no routing of a conversation's earlier turns. {NO_REPLAY}"


def _roles(config: Config) -> Iterator[str]:
    """Checks that every agent plays one role, at the same time as the others."""
    if not config.roles:
        return
    players, agents = [role.agent for role in config.roles], [agent.name for agent in config.agents]
    names = [role.name for role in config.roles]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"roles: the name {name!r} occurs {names.count(name)} times; every role needs its own"
    for name in sorted(set(players) - set(agents)):
        yield f"roles: there is no agent {name!r}; there are: {', '.join(agents)}"
    for name in sorted(set(agents)):
        if players.count(name) != 1:
            yield f"roles: the agent {name!r} plays {players.count(name)} roles; every agent plays one"
    if len(players) == 1:
        yield "roles: a conversation of one role is an agent's own. Nearest: leave [[roles]] out"
    if config.conversation.environment is None:
        yield "roles: nothing plays them without conversation.environment. Nearest: conversation.environment = 'relay'"
    if config.mode.takes_turns:
        yield "roles: agents that take turns on a device cannot answer each other. Nearest: placement = 'split'"


def _longest_words(config: Config) -> str:
    if config.conversation.environment is None:
        return "answer (rollout.max_prompt_tokens + max_answer_tokens"
    return "conversation (rollout.max_prompt_tokens + conversation.max_total_tokens"


def _position_problems(config: Config, architecture: Architecture) -> Iterator[str]:
    """A line where the model has fewer positions than the longest prompt with its answer."""
    prompt, most = config.rollout.max_prompt_tokens, architecture.max_positions
    if (longest := prompt + config.longest_answer) <= most:
        return
    answers = {
        "conversation.max_total_tokens": config.longest_rollout if config.conversation.environment else 0,
        "rollout.max_answer_tokens": config.rollout.max_answer_tokens,
        "evaluation.max_answer_tokens": config.evaluation.max_answer_tokens or 0,
    }
    nearest, room = [], most - prompt
    if room <= 0:
        room = config.longest_answer if config.longest_answer < most else most - most // 2
        nearest = [f"rollout.max_prompt_tokens = {most - room}"]
    nearest += [f"{key} = {room}" for key, tokens in answers.items() if tokens > room]
    yield (
        f"the longest prompt with its answer ({longest} tokens) is beyond the {most} positions of this "
        f"{architecture.family} model; shorten one. Nearest: {' with '.join(nearest)}"
    )


def _adapters(agent: AgentConfig, architecture: Architecture) -> Iterator[str]:
    """Checks that the model can have the adapters that the agent asks for."""
    try:
        lora = agent.adapters(architecture)
    except ValueError as problems:
        yield from str(problems).splitlines()
        return
    if lora is None:
        return
    yield from lora_problems(architecture, lora, tp=agent.tp)
    if agent.transformer == "te":
        yield (
            "transformer: TransformerEngine's layers have the norm before a projection inside, and adapters read what "
            "it answers. Nearest: 'auto', which with lora takes Megatron's own"
        )


def _folder(folder: Path, architecture: Architecture, *, reads_bytes: bool) -> Iterator[str]:
    wanted = {source.name: source.shape for source in all_sources(architecture)}
    problems = weight_problems(folder, wanted, family=architecture.family, tied=architecture.tied)
    yield from problems
    if reads_bytes and not problems and (problem := head_problem(folder, tied=architecture.tied)):
        yield problem


def architecture_of(agent: AgentConfig) -> Architecture:
    """An agent's architecture: from its folder or, before `init` has made it, from the init table. ValueError in one
    line."""
    if not is_planned(agent):
        return Architecture.from_folder(agent.model)
    init = agent.init
    same = {"num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "max_positions"}
    try:
        return Architecture.of_family(
            FAMILIES[init.family],
            **init.model_dump(include=same),
            vocab_size=len(init.vocabulary),
            norm_eps=1e-6,
            rope_theta=10_000.0,
            rope=None,
            tied=init.tied_embeddings,
        )
    except ValueError as problem:
        raise ValueError(f"init: {problem}") from problem


def named_models(config: Config) -> tuple[dict[str, Architecture], list[str]]:
    """Architectures by agent, and a line for every unknown model and every layout that a model cannot have."""
    models, problems = {}, []
    for agent in config.agents:
        try:
            model = models[agent.name] = _model_of(agent)
            layout, lines = _tables(config, agent)
            lines += [] if layout is None else _fit_problems(config, agent, model, layout)
        except ValueError as problem:
            lines = [str(problem)]
        problems += [f"agents.{agent.name}: {line}" for line in lines]
    return models, problems


def _model_of(agent: AgentConfig) -> Architecture:
    """An agent's architecture: from its folder or init table, else that of the public model of its name.

    ValueError for an unknown name.
    """
    if agent.init is not None or (agent.model / "config.json").is_file():
        return architecture_of(agent)
    return public_architecture(str(agent.model))


def apart_problems(config: Config) -> Iterator[str]:
    """A line for every key that does not fit the placement, with the nearest value that does."""
    if not config.mode.is_apart:
        for agent in config.agents:
            if agent.rollout_gpus:
                yield (
                    f"agents.{agent.name}.rollout_gpus ({agent.rollout_gpus}): with placement = {config.placement!r} "
                    "engines are on the devices that train. Nearest: placement = 'apart', or no rollout_gpus"
                )
        return
    if config.reward.while_sampling:
        yield (
            "reward.while_sampling: with placement = 'apart' the process that judges has no engine whose answers it "
            "sees end. Nearest: false"
        )
    for agent in config.agents:
        if agent.rollout_gpus is None:
            yield (
                f"agents.{agent.name}.rollout_gpus: with placement = 'apart' its engines have devices of their own, "
                f"and nobody says how many. Nearest: {agent.engine_tp or 1}"
            )
        if agent.offload == "optimizer":
            yield (
                f"agents.{agent.name}.offload: with placement = 'apart' the actor shares its device with no engine, so "
                "nothing is ever away. Nearest: 'none'"
            )


NO_REPLAY = "Nearest: router_replay = false"


def expert_problems(agent: AgentConfig, architecture: Architecture, *, on_cpu: bool) -> Iterator[str]:
    """A line for each setting that experts cannot have, with the nearest that works."""
    kind = agent.vllm.get("quantization")
    has_graphs = not (on_cpu or agent.vllm.get("enforce_eager"))
    if kind == "fp8_per_channel" and architecture.has_experts and has_graphs:
        # The strides of cutlass's experts are made anew with each weight sync; graphs have the addresses of the first.
        yield (
            f"vllm.quantization: {kind!r} with experts: CUDA graphs would read what a weight sync has freed. Nearest: "
            "'fp8_per_tensor', or vllm.enforce_eager = true beside it"
        )
    if not agent.router_replay:
        return
    if not architecture.has_experts:
        yield f"router_replay: a {architecture.family} model has no experts whose choice could be replayed. {NO_REPLAY}"
    elif architecture.shared_ffn:
        yield f"router_replay: not for models with shared experts, as {architecture.family}. {NO_REPLAY}"
    # On the CPU it is written down beside vLLM (rollout/vllm/routing.py).
    elif not on_cpu and agent.vllm.get("enable_prefix_caching") is False:
        yield (
            "vllm.enable_prefix_caching = false: with router_replay vLLM keeps the routing of a prefix beside its "
            "cache. Nearest: without it"
        )
