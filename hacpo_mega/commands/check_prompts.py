"""`hacpo-mega check --data`: reads every row of the prompt files, counts the prompts that are short enough, shows the
first one, and the reward of its gold.

Elsewhere: checks without reading the files (config/), and datasets that no run names (inspect_data.py).
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from urllib.parse import urlsplit

import torch

from hacpo_grading.graders.registry import find_grader
from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Asked
from hacpo_mega.config import Config
from hacpo_mega.config.checks.input_checks import missing_models
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.schema import RewardPartConfig
from hacpo_mega.conversations.environment import EnvironmentClass
from hacpo_mega.conversations.player import (
    Player,
    PlayLimits,
    environment_of,
    play_once,
    play_roles,
    turn_format,
)
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.data.prompt_files import require_good_files
from hacpo_mega.data.prompt_sets import held_out_prompts, left_out_line, training_rows, training_sampler
from hacpo_mega.data.reading.files import PromptRow
from hacpo_mega.data.reading.row_values import has_no_answer, quoted
from hacpo_mega.grading.reward_trial import MOST_ROWS, servers_of, try_reward
from hacpo_mega.grading.run_judge import judge_of
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.visible import one_line
from hacpo_mega.models.sharding.publish_plan import engine_layer_shapes
from hacpo_mega.records import Completion, Prompt
from hacpo_mega.rollout.vllm.engine_loop import odd_row_counts_of, order_of_arrival
from hacpo_mega.samples.tokenizers import TextCodec, agent_codecs, longest_encodings

MOST_LINES, MOST_CHARACTERS = 20, 200  # of a text, of each of its lines
CONNECT_S = 3.0
MOST_MEASURED = 1 << 22  # numbers of a layer's weights: a larger model does not run on a CPU
SHOWN_TURNS = 2  # turns of the agent in the conversation that is shown


def check_prompts(config: Config) -> str:
    """A sentence on the prompts of training and evaluation, and the first one as every agent and the judge read it.

    ValueError with a line per problem.
    """
    num_repeated = require_good_files(config)
    files = f"{len(config.data.files) + len(config.evaluation.files)} data files read, no bad row"
    if num_repeated:
        files += f", {num_repeated:,} rows left out whose prompt an earlier one has (data.repeated)"
    if missing_models(config):
        summary = f"{files}; prompts not counted in tokens before `hacpo-mega init` has made the models"
        return "\n".join((summary, *_tried_reward(config, training_rows(config)[:MOST_ROWS])))
    environment = environment_of(config.conversation, has_roles=bool(config.roles))
    codecs = agent_codecs(config.agents, () if environment is None else environment.tools)
    num_tokens = longest_encodings(config.agents, codecs)
    sampler, num_dropped = training_sampler(config, num_tokens)
    held_out, num_left_out = held_out_prompts(config, num_tokens)
    summary = (
        f"{files}; {sum(map(len, sampler.rows_by_skill))} prompts to train on, {num_dropped} longer than "
        f"rollout.max_prompt_tokens left out; {len(held_out)} to evaluate on"
    )
    summary += f", {left_out_line(num_left_out)}" if num_left_out else ""
    rows = sampler.rows_by_skill[0]
    summary += _without_answer(config, [row for group in sampler.rows_by_skill for row in group])
    turns = () if environment is None else _conversation(config, environment, codecs, rows[0])
    return "\n".join((summary, *_as_encoded(config, codecs, rows[0]), *_tried_reward(config, rows[:MOST_ROWS]), *turns))


def _without_answer(config: Config, rows: Sequence[PromptRow]) -> str:
    """A warning about golds that mark a prompt without an answer; empty if there are none."""
    marked = [row for row in rows if has_no_answer(config.data.prompt_field, row.gold)]
    if not marked:
        return ""
    return (
        f"\nwarning: the gold of {len(marked):,} prompts ({quoted(marked[0].gold)}) is no answer, so that none to them "
        "is right: `hacpo-mega data convert --skip-bad` leaves them out"
    )


def _conversation(
    config: Config, environment: EnvironmentClass, codecs: Sequence[TextCodec], row: PromptRow
) -> Iterator[str]:
    """One conversation on the first prompt, as every agent would read it; each turn of an agent is the prompt's gold.

    ValueError for an environment that fails on it, or a chat template that cannot write it.
    """
    tools = ", ".join(tool.get("function", tool)["name"] for tool in environment.tools)
    plays = "an agent program" if environment.plays else f"tools {tools}" if tools else "no tools"
    yield f"\nenvironment {environment.name}: {plays}"
    limits = PlayLimits.of(config)
    limits = replace(limits, max_turns=min(SHOWN_TURNS, limits.max_turns))
    prompt = Prompt(0, row.id, row.text, row.gold, row.skill, row.row)
    by_agent = {agent.name: codec for agent, codec in zip(config.agents, codecs, strict=True)}
    formats = {agent: _turn_format(agent, codec, environment, config) for agent, codec in by_agent.items()}
    turn = prompt, row.gold, config.rollout.max_answer_tokens
    if config.roles:
        by_role = {role.name: by_agent[role.agent] for role in config.roles}
        names = [f"{role.name} ({role.agent})" for role in config.roles]
        agents = [role.agent for role in config.roles]
        played = play_roles(environment, by_role, limits, *turn)
    else:
        names = agents = list(by_agent)
        played = [_played_alone(environment, codec, limits, *turn) for codec in by_agent.values()]
    for name, agent, completion in zip(names, agents, played, strict=True):
        conversation, rewrites = completion.conversation, formats[agent].rewrites
        if conversation.counts.get("failed"):
            reason = environment.last_error or "it says nothing that this agent can read"
            raise ValueError(f"conversation.environment: {environment.name} fails on the first prompt: {reason}")
        segment = ": a segment begins there" if config.conversation.as_rendered else ""
        history = f", which writes earlier turns otherwise ({rewrites}){segment}" if rewrites else ""
        yield f"{name} reads turns by {formats[agent].kind}{history}; with the gold as each of its turns:"
        ids = [*by_agent[agent].encode_prompt(conversation.task or row.text, conversation.opening)]
        ids += completion.token_ids.tolist()
        yield from _excerpt(by_agent[agent].tokenizer.decode(ids, skip_special_tokens=False))
        yield f"  reward {'of the judge' if conversation.reward is None else conversation.reward}"
    for agent in config.agents:
        yield f"{agent.name} on the CPU: {order_of_arrival(_odd_row_counts(agent))}"


def _odd_row_counts(agent: AgentConfig) -> set[int] | None:
    """The engine's measurement, on this processor; None with experts, and for a model that is too large for a CPU."""
    architecture = Architecture.from_folder(agent.model)
    shapes = engine_layer_shapes(architecture, tp=agent.engine_tensor_parallel)
    largest = max(outputs * inputs for outputs, inputs in shapes)
    is_known = not architecture.has_experts and largest <= MOST_MEASURED
    return odd_row_counts_of(shapes, getattr(torch, agent.dtype or "float32")) if is_known else None


def _turn_format(agent: str, codec: TextCodec, environment: EnvironmentClass, config: Config) -> TurnFormat:
    try:
        return turn_format(codec, environment, has_roles=bool(config.roles))
    except ValueError as error:
        raise ValueError(f"agents.{agent}: {error}") from error


def _played_alone(
    environment: EnvironmentClass, codec: TextCodec, limits: PlayLimits, prompt: Prompt, text: str, max_tokens: int
) -> Completion:
    with closing(Player(environment, codec, limits)) as player:
        return play_once(player, codec, limits, prompt, [text], max_tokens)


def _as_encoded(config: Config, codecs: Sequence[TextCodec], row: PromptRow) -> Iterator[str]:
    for agent, codec in zip(config.agents, codecs, strict=True):
        num_tokens = len(codec.encode_prompt(row.text))
        yield f"\n{agent.name} reads of the first prompt {num_tokens} tokens:"
        yield from _excerpt(codec.shown_prompt(row.text))
        first, *others = map(codec.token_text, codec.ends.ids)
        also = f"; an own answer may end with {', '.join(others)}, too" if others else ""
        yield f"  an answer, also of another agent, ends with {first}{also}"
    for key, grader in config.reward.graders.items():
        yield f"\nits gold, as {key} reads it:"
        yield from _excerpt(_read_gold(grader, config.reward.timeout_s, row))


def _tried_reward(config: Config, rows: Sequence[PromptRow]) -> Iterator[str]:
    """Rewards of the first prompts' golds and of an empty answer. ValueError if a grader gives no reward.

    Nothing is tried if a grader asks a server (kind `model`) that cannot be reached from here.
    """
    for key, url in servers_of(config.reward).items():
        if not _is_reachable(url):
            yield f"\nnot tried: no server answers at {url} from here, which {key} asks"
            return
    with judge_of(config.reward.model_copy(update={"num_workers": 1})) as judge:
        trial = try_reward(config.reward, judge, rows, config.agents[0].name)
    if trial.refusal:
        raise ValueError(trial.refusal)
    yield f"\n{trial}"
    yield from trial.warnings


def _is_reachable(url: str) -> bool:
    """True if something listens at a URL's address."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def _read_gold(grader: RewardPartConfig, timeout_s: float, row: PromptRow) -> str:
    """The gold as its grader parses it; the plain text for a grader that runs code or asks a server."""
    kind = find_grader(grader.kind)
    if kind.acts:
        return row.gold
    with Judge(grader.kind, timeout_s=timeout_s, options=grader.options) as judge:
        answer = kind.gold_as_answer(row.gold)
        ((judgement, explanation),) = judge.judge_and_explain([Asked(row.text, answer, row.gold)])
        error = judge.take_report().first_error
    read = next((explanation[name] for name in ("parsed_gold", "gold") if explanation.get(name) is not None), row.gold)
    return str(read) if judgement.is_judged else f"{row.gold} CANNOT BE JUDGED: {error}"


def _excerpt(text: str) -> Iterator[str]:
    """The lines of a text; a long one keeps its beginning and its end."""
    lines = [_cut(one_line(line)) for line in text.split("\n")]
    hidden = len(lines) - MOST_LINES
    if hidden > 0:
        half = MOST_LINES // 2
        lines[half:-half] = [f"... {hidden} lines ..."]
    yield from (f"  | {line}" for line in lines)


def _cut(line: str) -> str:
    half = MOST_CHARACTERS // 2
    return line if len(line) <= MOST_CHARACTERS else f"{line[:half]} [...] {line[-half:]}"
